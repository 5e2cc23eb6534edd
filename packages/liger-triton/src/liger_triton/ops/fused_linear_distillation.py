"""Distillation of two linear layers: PyTorch's matmul computes chunks of logits, and `_distillation`'s kernels work on those."""

from liger_core.contract import implements
from liger_core.host.fused_linear_distillation import FusedLinearDistillation
from liger_core.ops.fused_linear_distillation import fused_linear_distillation
from liger_triton.ops._distillation import KERNELS
from liger_triton.ops._linear import LINEAR

_host = FusedLinearDistillation(KERNELS, LINEAR)
forward = implements(fused_linear_distillation)(_host.forward)
backward = _host.backward
