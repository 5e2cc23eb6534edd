"""Distillation of two linear layers: the kernels of `_distillation` work on chunks of logits, which PyTorch's matmul computes."""

from liger_core.contract import implements
from liger_core.host.fused_linear_distillation import FusedLinearDistillation
from liger_core.ops.fused_linear_distillation import fused_linear_distillation
from liger_cutile.ops._distillation import KERNELS
from liger_cutile.ops._linear import LINEAR

_host = FusedLinearDistillation(KERNELS, LINEAR)
forward = implements(fused_linear_distillation)(_host.forward)
backward = _host.backward
