"""Statistics of a linear layer's logits: PyTorch's matmul computes tiles of logits in float32, and kernels work on those."""

from liger_core.contract import implements
from liger_core.host.fused_linear_logit_statistics import FusedLinearStatistics
from liger_core.ops.fused_linear_logit_statistics import fused_linear_logit_statistics
from liger_triton.ops._linear import LINEAR
from liger_triton.ops._logit_statistics import KERNELS

_host = FusedLinearStatistics(KERNELS, LINEAR)
forward = implements(fused_linear_logit_statistics)(_host.forward)
backward = _host.backward
