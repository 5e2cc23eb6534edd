"""Cross-entropy: forward and backward read the logits once each, and never copy them."""

from liger_core.contract import implements
from liger_core.host.cross_entropy import CrossEntropy
from liger_core.ops.cross_entropy import cross_entropy
from liger_triton.ops._cross_entropy import KERNELS

_host = CrossEntropy(KERNELS)
forward = implements(cross_entropy)(_host.forward)
backward = _host.backward
