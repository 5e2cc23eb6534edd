"""Statistics of logits: forward and backward read the logits once each, and never copy them."""

from liger_core.contract import implements
from liger_core.host.logit_statistics import Statistics
from liger_core.ops.logit_statistics import logit_statistics
from liger_triton.ops._logit_statistics import KERNELS

_host = Statistics(KERNELS)
forward = implements(logit_statistics)(_host.forward)
backward = _host.backward
