"""Editors and `help` show the functions that run."""

from __future__ import annotations

import inspect
import pydoc
import typing

import pytest
import torch

import liger_core
from liger_core.contract import ops
from liger_core.op import OverloadedOp
from liger_core.ops.cross_entropy import CrossEntropyCall, CrossEntropyOptions
from liger_core.ops.fused_linear_cross_entropy import FusedLinearCrossEntropyCall, FusedLinearCrossEntropyOptions

CALLS = {
    "cross_entropy": (CrossEntropyCall, CrossEntropyOptions),
    "fused_linear_cross_entropy": (FusedLinearCrossEntropyCall, FusedLinearCrossEntropyOptions),
}


def test_each_op_with_overloads_is_compared() -> None:
    assert {name for name, op in ops.items() if isinstance(op, OverloadedOp)} == {*CALLS}


@pytest.mark.skipif(not hasattr(typing, "get_overloads"), reason="Python 3.10 forgets overloads")
@pytest.mark.parametrize("name", CALLS)
def test_overloads_have_the_contracts_parameters(name: str) -> None:
    op, (call, options) = ops[name], CALLS[name]
    overloads = typing.get_overloads(call.__call__)  # type: ignore[attr-defined]
    assert len(overloads) == 5
    for overload in overloads:
        parameters = [
            p for p in list(inspect.signature(overload).parameters.values())[1:] if p.kind is not p.VAR_KEYWORD
        ]
        shared = options.__required_keys__ | options.__optional_keys__
        assert {p.name for p in parameters} | shared == {*op.names}
        assert not {p.name for p in parameters} & shared
        for parameter in parameters:
            contract = op.signature.parameters[parameter.name]
            assert parameter.kind is contract.kind
            assert parameter.default in (contract.default, parameter.empty)


def test_help_shows_ops_as_functions() -> None:
    text = pydoc.plain(pydoc.render_doc(liger_core))
    functions = text[text.index("\nFUNCTIONS\n") :]
    for name, op in ops.items():
        assert f"\n    {name}(" in functions
        assert (op.__doc__ or "").splitlines()[0] in functions
    assert "<liger op" not in text


def test_a_bound_op_has_the_ops_signature_and_help() -> None:
    bound = liger_core.get_op("rms_norm", language="torch")
    assert inspect.signature(bound) == liger_core.rms_norm.signature
    assert bound.__doc__ == liger_core.rms_norm.__doc__
    assert liger_core.get_op(liger_core.rms_norm, language="torch")(torch.ones(1, 2), None).shape == (1, 2)


def test_an_op_as_an_attribute_is_the_op() -> None:
    """An op as an attribute of a class, and of an instance: Dynamo up to torch 2.11 looks for the latter in the class."""

    class Layer(torch.nn.Module):
        norm = liger_core.rms_norm

        def __init__(self) -> None:
            super().__init__()
            self.own = liger_core.rms_norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.norm(x, None), None)

    x = torch.randn(2, 4)
    assert Layer.norm is liger_core.rms_norm
    expected = liger_core.rms_norm(liger_core.rms_norm(x, None), None)
    torch.testing.assert_close(Layer()(x), expected)
    torch.compiler.reset()
    compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)
