"""Statistics of logits: the logits are read once forward and once backward, and copied nowhere."""

from liger_core.contract import implements
from liger_core.host.logit_statistics import Statistics
from liger_core.ops.logit_statistics import logit_statistics
from liger_triton.ops._logit_statistics import KERNELS

_host = Statistics(KERNELS)
forward = implements(logit_statistics)(_host.forward)
backward = _host.backward
