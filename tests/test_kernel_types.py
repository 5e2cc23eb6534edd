"""`tools/kernel_types.py`, which CI runs over the kernel packages, tells of a signature that isn't its contract's."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("kernel_types", ROOT / "tools" / "kernel_types.py")
assert _spec is not None
assert _spec.loader is not None
kernel_types = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernel_types)

KERNEL = """
from torch import Tensor

from liger_core import softmax
from liger_core.contract import Needs, Saved, implements


@implements(softmax)
def forward(needs: Needs, {parameter}: Tensor) -> tuple[Tensor, Saved]:
    return {parameter}, ()
"""


def test_a_signature_that_is_not_the_contracts(tmp_path: Path) -> None:
    for name, parameter in (("right", "x"), ("wrong", "logits")):
        (tmp_path / f"{name}.py").write_text(KERNEL.format(parameter=parameter))
    count, errors = kernel_types.mismatches([tmp_path])
    assert count == 2
    (error,) = errors
    assert error.startswith(f"{tmp_path / 'wrong.py'}:8: ")
    assert 'name mismatch: "x" versus "logits"' in error.replace("Parameter ", "")


def test_nothing_to_compare_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    assert kernel_types.main([str(tmp_path)]) == 1


def test_all_packages_are_compared() -> None:
    names = {path.parent.name for path in kernel_types.PACKAGES}
    assert {"liger-triton", "liger-triton-ascend", "liger-cutile"} <= names
