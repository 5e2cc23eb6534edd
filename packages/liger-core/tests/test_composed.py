"""Ops that core makes of a language's kernels, of a package that is written here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

import liger_core
from liger_core import BackendInfo
from liger_core.composed import COMPOSED
from liger_core.contract import ops

KERNELS = """
from liger_core.host.cross_entropy import CrossEntropyKernels

class AcmeCrossEntropy(CrossEntropyKernels):
    def rows(self, results, logits, *others):
        results.losses.fill_(7.0)

    def sums(self, loss, z_loss, accuracy, totals, results, labels):
        loss.copy_(results.losses.sum())

KERNELS = AcmeCrossEntropy()
"""
OWN = """
import torch

def forward(needs, **arguments):
    return torch.tensor(8.0), ()

def backward(needs, saved, dloss, **options):
    raise NotImplementedError
"""
CALL = torch.zeros(2, 3), torch.tensor([0, 1])


@pytest.fixture
def write(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str, str], None]]:
    """Writes a file of the package's ``ops``."""
    folder = tmp_path / "liger_composing" / "ops"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    install(BackendInfo("acme", ("cpu",), "torch", "liger_composing", "pip install acme", ("cpu",)))
    yield lambda name, text: (folder / name).write_text(text)
    for name in [name for name in sys.modules if name.startswith("liger_composing")]:
        del sys.modules[name]


def test_a_language_has_an_op_as_soon_as_it_has_the_files(write: Callable[[str, str], None]) -> None:
    assert "acme: no: liger_composing has no kernel for cross_entropy" in str(liger_core.explain("cross_entropy"))
    write("_cross_entropy.py", KERNELS)
    (acme, *_) = liger_core.backends()
    assert [op for op in ops if acme.has_kernel(op)] == ["cross_entropy"]
    assert "liger_composing.ops._cross_entropy" not in sys.modules
    assert liger_core.cross_entropy(*CALL, reduction="sum") == 14.0
    chosen = liger_core.explain("cross_entropy", *CALL).chosen
    assert chosen is not None
    assert (chosen.source or "").endswith("liger_composing/ops/_cross_entropy.py:1")
    assert (
        acme.kernel("cross_entropy") is acme.kernel("cross_entropy") is sys.modules["liger_composing.ops.cross_entropy"]
    )
    write("_linear.py", "from liger_core.host.linear import Linear\nLINEAR = Linear()\n")
    assert [op for op in sorted(ops) if acme.has_kernel(op)] == ["cross_entropy", "fused_linear_cross_entropy"]


def test_a_file_of_the_ops_own_name_comes_first(write: Callable[[str, str], None]) -> None:
    write("_cross_entropy.py", KERNELS)
    write("cross_entropy.py", OWN)
    assert liger_core.cross_entropy(*CALL) == 8.0
    assert "liger_composing.ops._cross_entropy" not in sys.modules


def test_a_file_without_the_kernels_is_an_error_at_the_first_call(write: Callable[[str, str], None]) -> None:
    write("_cross_entropy.py", "")
    with pytest.raises(AttributeError, match="liger_composing.ops._cross_entropy.*KERNELS"):
        liger_core.cross_entropy(*CALL)


@pytest.mark.parametrize("op", COMPOSED)
def test_each_composition_is_of_an_op_and_names_what_its_host_takes(op: str) -> None:
    host, kernels = COMPOSED[op]
    assert op in ops
    assert set(signature(resolve_name(f"liger_core.host.{host}")).parameters) == set(kernels)
