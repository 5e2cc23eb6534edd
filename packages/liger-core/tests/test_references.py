"""No contract is left out: each has a docstring with its sections, and tests of its reference."""

import ast
import re
from pathlib import Path

import pytest
import torch

from liger_core.contract import ops

HERE = Path(__file__).parent


def in_small() -> set[str]:
    """The keys of `SMALL`, whose ops go through every test of test_references_basic.py."""
    tree = ast.parse((HERE / "test_references_basic.py").read_text("utf-8"))
    (table,) = [n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "SMALL"]
    assert isinstance(table, ast.Dict)
    return {key.value for key in table.keys if isinstance(key, ast.Constant)}


def used(file: str) -> set[str]:
    """The names that a file of tests reads: as variables, or as attributes of a module."""
    nodes = list(ast.walk(ast.parse((HERE / file).read_text("utf-8"))))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return names | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


@pytest.mark.parametrize("name", sorted(ops))
def test_every_reference_is_tested(name: str) -> None:
    files = ("test_references_losses.py", "test_losses.py")
    here = {"rms_norm", "fused_linear_logit_statistics"}  # tests of their own, in test_references_basic.py and below
    tested = in_small() | here | used(files[0]) | used(files[1])
    assert name in tested, (
        f"add {name} to SMALL in test_references_basic.py, or tests to test_references_losses.py or test_losses.py"
    )


@pytest.mark.parametrize("name", sorted(ops))
def test_every_docstring_has_its_sections(name: str) -> None:
    """What each argument takes, what is returned, what is refused, and where the formula is from: none of them empty."""
    text = ops[name].reference.__doc__ or ""
    for section in ("Args", "Returns", "Raises", "Source"):
        assert re.search(rf"^    {section}:\n        \S", text, re.M), f"{name}'s docstring lacks {section}:"
    arguments = text[text.find("    Args:") : text.find("    Returns:")]
    missing = [n for n in ops[name].names if not re.search(rf"^        [^:\n]*\b{n}\b[^:\n]*:", arguments, re.M)]
    assert not missing, f"{name}'s docstring says nothing of {', '.join(missing)} under Args:"


def test_fused_linear_logit_statistics_is_logit_statistics_of_the_product() -> None:
    """Results and gradients, in float64."""
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (7, 4)))
    target = torch.tensor([0, 6, 3, 2, 1])
    fused = ops["fused_linear_logit_statistics"].reference(x, weight, target)
    parts = ops["logit_statistics"].reference(x @ weight.T, target)
    for one, other in zip(fused, parts, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    total, expected = (sum(r.square().sum() for r in found if r is not None) for found in (fused, parts))
    gradients, wanted = (torch.autograd.grad(value, (x, weight)) for value in (total, expected))
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other)
