"""Proof of route: a package that has its answers from elsewhere, or gives none, fails the suite."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

ACME = Path(__file__).parent / "acme" / "liger_acme"
PICKY = Path(__file__).parent / "picky" / "liger_picky"

Suite = Callable[..., subprocess.CompletedProcess[str]]

FEW = ("-k", "test_route or test_claims or test_values and odd")

DIFFERENTIATE = """
    with torch.enable_grad():
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        grads = torch.autograd.grad({}, leaves, dy)
    return tuple(value if wanted else None for value, wanted in zip(grads, needs))
"""
REFERENCE = "{}(*leaves, eps, offset=offset, casting_mode=casting_mode)"
SAVED = "    x, weight, inverse_rms = saved\n"

# what is wrong: (text of the kernel, the mutant's, what the suite says)
MUTANTS = {
    "a forward that copies the result of __wrapped__": (
        "    return y, (x",
        "    y.copy_(rms_norm.__wrapped__(x, weight, eps, offset=offset, casting_mode=casting_mode))\n    return y, (x",
        "the reference of rms_norm ran where rms_norm-acme-",
    ),
    "a forward that copies the result of a function that was taken at import": (
        "    return y, (x",
        "    y.copy_(reference(x, weight, eps, offset=offset, casting_mode=casting_mode))\n    return y, (x",
        "the reference of rms_norm ran where rms_norm-acme-",
    ),
    "a backward that is autograd of __wrapped__": (
        SAVED,
        SAVED + DIFFERENTIATE.format(REFERENCE.format("rms_norm.__wrapped__")),
        "the reference of rms_norm ran where rms_norm-acme-",
    ),
    "a backward that launches nothing": (
        SAVED,
        SAVED
        + DIFFERENTIATE.format(
            "torch.nn.functional.rms_norm(leaves[0].float(), x.shape[-1:], offset + leaves[1].float(), eps).to(x.dtype)"
        ),
        "launched no kernel: it computes by other means",
    ),
    "a backward that raises Unsupported": (
        SAVED,
        "    from liger_core import Unsupported\n\n    raise Unsupported('not today')\n",
        "raised Unsupported while it ran; refuses says it before, or nobody does: not today",
    ),
    "a refuses that always refuses": (
        "    if weight is None:\n",
        "    return 'not today'\n    if weight is None:\n",
        "owes the case odd, which it refuses: not today. Take it, or say why in liger_acme.unclaimed",
    ),
}


@pytest.fixture
def acme_in(tmp_path: Path, install_package: Callable[..., Path]) -> Path:
    """A folder where liger-acme is installed."""
    return install_package(tmp_path / "site", "acme", ACME).parent


def test_the_kernel_itself_passes(acme_in: Path, run_suite: Suite) -> None:
    done = run_suite(acme_in, "--impl=acme", *FEW)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("wrong", MUTANTS)
def test_mutants_fail(wrong: str, acme_in: Path, run_suite: Suite) -> None:
    text, mutant, says = MUTANTS[wrong]
    kernel = acme_in / "liger_acme" / "ops" / "rms_norm.py"
    source = kernel.read_text("utf-8")
    assert text in source, f"{text!r} is not in {kernel.name}: bring the mutant up to date"
    taken = "from liger_core.contract import Needs, Saved, implements\n\nreference = rms_norm.reference\n"
    source = source.replace("from liger_core.contract import Needs, Saved, implements\n", taken)
    kernel.write_text(source.replace(text, mutant), "utf-8")
    done = run_suite(acme_in, "--impl=acme", *FEW)
    assert done.returncode == 1, done.stdout + done.stderr
    assert says in done.stdout, done.stdout


@pytest.fixture
def picky_in(tmp_path: Path, install_package: Callable[..., Path]) -> Path:
    """A folder where liger-picky is installed, which refuses the first case of swiglu and says why."""
    return install_package(tmp_path / "site", "picky", PICKY).parent


CLAIMS = ("--impl=picky", "--device=cpu", "-k", "test_claims")


def test_a_refusal_that_is_declared_passes(picky_in: Path, run_suite: Suite) -> None:
    done = run_suite(picky_in, *CLAIMS)
    assert done.returncode == 0, done.stdout + done.stderr
    (picky_in / "liger_picky" / "unclaimed.py").unlink()
    assert run_suite(picky_in, *CLAIMS).returncode == 1


def test_a_declaration_of_what_is_taken_fails(picky_in: Path, run_suite: Suite) -> None:
    kernel = picky_in / "liger_picky" / "ops" / "swiglu.py"
    kernel.write_text(kernel.read_text("utf-8").replace("if gate.shape[-1] % 16 else", "if gate.shape[-1] < 2 else"))
    done = run_suite(picky_in, *CLAIMS)
    assert done.returncode == 1, done.stdout
    assert "liger_picky.unclaimed declares what swiglu-picky-cpu takes: odd" in done.stdout


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"swiglu-odd-*": " "}, "liger_picky.unclaimed: 'swiglu-odd-*' takes a reason"),
        ({"swiglu-even-*": "why"}, "liger_picky.unclaimed: 'swiglu-even-*' is of no op, its first case and a dtype"),
    ],
)
def test_a_declaration_has_a_reason_and_a_case(
    picky_in: Path, run_suite: Suite, declared: dict[str, str], says: str
) -> None:
    (picky_in / "liger_picky" / "unclaimed.py").write_text(f"UNCLAIMED = {declared!r}\n")
    done = run_suite(picky_in, *CLAIMS)
    assert done.returncode != 0
    assert says in done.stdout + done.stderr
