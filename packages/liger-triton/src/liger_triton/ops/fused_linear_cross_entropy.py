"""Cross-entropy of a linear layer: PyTorch's matmul computes chunks of logits, and kernels work on those."""

from liger_core.contract import implements
from liger_core.host.fused_linear_cross_entropy import FusedLinearCrossEntropy
from liger_core.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_triton.ops._cross_entropy import KERNELS
from liger_triton.ops._linear import LINEAR

_host = FusedLinearCrossEntropy(KERNELS, LINEAR)
forward = implements(fused_linear_cross_entropy)(_host.forward)
backward = _host.backward
