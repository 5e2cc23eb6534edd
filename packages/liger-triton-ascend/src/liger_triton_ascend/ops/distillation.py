"""Distillation from logits: the kernels of `_distillation`, on all rows at once."""

from liger_core.contract import implements
from liger_core.host.distillation import Distillation
from liger_core.ops.distillation import distillation
from liger_triton_ascend.ops._distillation import KERNELS

_host = Distillation(KERNELS)
forward = implements(distillation)(_host.forward)
backward = _host.backward
