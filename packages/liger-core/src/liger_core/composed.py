"""Ops that core makes of a language's kernels: a language that has those has the ops too, without a file for them."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import resolve_name
from types import ModuleType
from typing import NamedTuple


class Composition(NamedTuple):
    """How an op is made.

    Attributes:
        host: a class of `liger_core.host`, as ``"module:class"``.
        kernels: its arguments by name: names in the files of a language's ``ops``, as ``"file:name"``, or whole files, as
            ``"file:"``. `explain` shows the first file.
    """

    host: str
    kernels: dict[str, str]

    @property
    def files(self) -> list[str]:
        """The files of a language's ``ops`` that the op is made of."""
        return [kernel.partition(":")[0] for kernel in self.kernels.values()]


_CROSS_ENTROPY = {"kernels": "_cross_entropy:KERNELS"}
_DISTILLATION = {"kernels": "_distillation:KERNELS"}
_STATISTICS = {"kernels": "_logit_statistics:KERNELS"}
_LINEAR = {"linear": "_linear:LINEAR"}

COMPOSED = {
    "cross_entropy": Composition("cross_entropy:CrossEntropy", _CROSS_ENTROPY),
    "distillation": Composition("distillation:Distillation", _DISTILLATION),
    "fused_linear_cross_entropy": Composition(
        "fused_linear_cross_entropy:FusedLinearCrossEntropy", _CROSS_ENTROPY | _LINEAR
    ),
    "fused_linear_distillation": Composition(
        "fused_linear_distillation:FusedLinearDistillation", _DISTILLATION | _LINEAR
    ),
    "fused_linear_kl_div": Composition("fused_linear_kl_div:FusedLinearKLDiv", _DISTILLATION | _LINEAR),
    "fused_linear_logit_statistics": Composition(
        "fused_linear_logit_statistics:FusedLinearStatistics", _STATISTICS | _LINEAR
    ),
    "gated_mlp": Composition("gated_mlp:GatedMLP", {"silu": "swiglu:", "gelu_tanh": "geglu:"} | _LINEAR),
    "logit_statistics": Composition("logit_statistics:Statistics", _STATISTICS),
}


def has_kernel(package: str, op: str) -> bool:
    """Whether a language's package has a file for an op, or the files that core makes it of. Imports none of them."""
    ops = f"{package}.ops"
    if find_spec(ops) is None:
        return False
    if find_spec(f"{ops}.{op}") is not None:
        return True
    return op in COMPOSED and all(find_spec(f"{ops}.{file}") is not None for file in COMPOSED[op].files)


def kernel_of(package: str, op: str) -> ModuleType:
    """The module that implements an op in a language: the package's file; if it has none, what core makes, as if it were one."""
    name = f"{package}.ops.{op}"
    if op not in COMPOSED or find_spec(name) is not None:
        return import_module(name)
    host, kernels = COMPOSED[op]
    implementation = resolve_name(f"liger_core.host.{host}")(
        **{argument: resolve_name(f"{package}.ops.{kernel}") for argument, kernel in kernels.items()}
    )
    module = ModuleType(name, implementation.__doc__)
    module.__spec__ = ModuleSpec(name, None)
    module.__file__ = import_module(f"{package}.ops.{COMPOSED[op].files[0]}").__file__
    for function in ("forward", "backward", "refuses", "saves_early"):
        if hasattr(implementation, function):
            setattr(module, function, getattr(implementation, function))
    sys.modules[name] = module
    return module
