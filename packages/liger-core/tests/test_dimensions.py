"""The line that says which dimensions are independent: how it is read, and what is said of a wrong one."""

from __future__ import annotations

import pytest
from torch import Tensor

from liger_core import contract, rms_norm
from liger_core.contract import op, ops
from liger_core.dimensions import expand, independent, parse


def test_what_an_op_declares() -> None:
    assert rms_norm.dimensions is not None
    assert rms_norm.dimensions.tensors == {"x": ("...", "H"), "weight": ("H",)}
    assert [result.names for result in rms_norm.dimensions.results] == [("...", "H")]


def test_every_op_declares_its_dimensions() -> None:
    assert not [name for name, one in ops.items() if one.dimensions is None]


@pytest.mark.parametrize(
    ("declared", "dims", "names"),
    [
        ("... H", 3, "...1 ...0 H"),
        ("... H", 1, "H"),
        ("n C *", 2, "n C"),
        ("n C *", 4, "n C *1 *0"),
        ("b s R", 2, "s R"),
        ("B", 0, ""),
        ("... V@dim", 3, "...1 V@dim ...0"),
    ],
)
def test_names_of_dimensions(declared: str, dims: int, names: str) -> None:
    """Aligned at the right, as broadcasting is."""
    assert expand(declared.split(), dims, {"dim": -2}) == tuple(names.split())


def test_more_dimensions_than_declared() -> None:
    with pytest.raises(ValueError, match="b s R is declared; a tensor has 4 dimensions"):
        expand(("b", "s", "R"), 4, {})


def test_independent() -> None:
    assert [name for name in ("n", "h'", "...0", "V", "V@dim", "*0") if independent(name)] == ["n", "h'", "...0"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("x: n H, weight: H", "one ->"),
        ("x: n H -> n H -> n H", "one ->"),
        ("x n H, weight: H -> n H", "'x n H' has no colon"),
        ("y: n H, weight: H -> n H", "no tensor argument 'y'; they are x, weight, labels"),
        ("eps: n H, weight: H -> n H", "no tensor argument 'eps'"),
        ("x: n H, x: n H, weight: H -> n H", "x stands twice"),
        ("x: n H, labels: n -> n H", "weight is missing"),
        ("x: n 4, weight: H, labels: n -> n H", "'4' is no dimension"),
        ("x: n H', weight: H, labels: n -> n H", '"H\'" is no dimension'),
        ("x: n n, weight: H, labels: n -> n H", "'n n' has n beside another"),
        ("x: ... *, weight: H, labels: n -> n H", "'... \\*' has ... beside another"),
        ("x: n H@dim, weight: H, labels: n -> n H", "no option 'dim'; they are eps, ignore_index"),
        ("x: n H, weight: h, labels: n -> n H", "H differs from another name in its case alone"),
        ("x: n H, weight: k', labels: n -> n H", "k' is divided as k, which no argument has"),
        ("x: n H, weight: H, labels: n -> n K", "no argument has K"),
        ("x: n H, weight: H, labels: n -> /tokens", "/tokens divides by labels"),
        ("x: n H, weight: H, labels: n -> n H, n H", "it has 2 results; the op has 1"),
    ],
)
def test_a_wrong_line_is_an_error_that_says_why(line: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse(line, "toy", ("x", "weight", "labels"), ("eps", "ignore_index"), 1)
    assert str(caught.value).startswith(f"toy: dimensions is {line!r}: ")


def test_a_mean_needs_an_ignored_label() -> None:
    with pytest.raises(ValueError, match="and that option"):
        parse("x: n H, labels: n -> /labels", "toy", ("x", "labels"), (), 1)


@pytest.mark.parametrize(("returns", "several"), [(Tensor, 1), (tuple[Tensor, Tensor], 2)])
def test_it_is_read_when_the_op_is_declared(returns: object, several: int) -> None:
    def toy(x: Tensor) -> Tensor:
        return x

    toy.__annotations__ = {"x": Tensor, "return": returns}
    with pytest.raises(ValueError, match=f"it has 3 results; the op has {several}"):
        op(differentiable=("x",), dimensions="x: n -> n, n, n")(toy)
    assert "toy" not in contract.ops
