"""KL divergence of a linear layer from given probabilities: `_distillation`'s kernels work on chunks of logits."""

from liger_core.contract import implements
from liger_core.host.fused_linear_kl_div import FusedLinearKLDiv
from liger_core.ops.fused_linear_kl_div import fused_linear_kl_div
from liger_triton.ops._distillation import KERNELS
from liger_triton.ops._linear import LINEAR

_host = FusedLinearKLDiv(KERNELS, LINEAR)
forward = implements(fused_linear_kl_div)(_host.forward)
backward = _host.backward
