"""The rule that says whether a kernel is right: measured against float64, relative to PyTorch's own rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FEW = 64
"""An output of no more elements than this may be right in the baseline by luck."""

DRAWS = 16
"""Over how many draws of the inputs the baseline's error of such an output is taken."""


class Mismatch(AssertionError):
    """A kernel's output is wrong."""


def compare(
    name: str,
    actual: Tensor | None,
    baseline: Tensor | None,
    truth: Tensor | None,
    other_draws: Callable[[], list[tuple[Tensor, Tensor]]] | None = None,
    *,
    units: int = 1,
) -> None:
    """Check one output or gradient.

    max|actual − truth| ≤ 2 · max|baseline − truth| + eps(dtype) · max|truth|, where `baseline` is the reference in the
    kernel's own dtype and `truth` the reference in float64 on the same inputs. Where the baseline has infinities or
    NaN, the kernel has the same. Integers are equal.

    Args:
        name: of the output, for the message.
        actual: what the kernel gave.
        baseline: what the reference gives in the same dtype.
        truth: what the reference gives in float64, there or on the CPU.
        other_draws: (baseline, truth) of other inputs of the same sizes, asked for when an output has few elements: its
            baseline error is then the greatest of all draws, as it is or relative to the truth.
        units: of rounding that are allowed beside the baseline's error, for what is known to round more often.

    Raises:
        Mismatch: with what was allowed and what was found.
    """
    if actual is None or baseline is None or truth is None:
        if actual is not None or baseline is not None:
            raise Mismatch(f"{name} is {_is(actual)}; the contract says {_is(baseline)}")
        return
    for what in ("shape", "dtype", "device"):
        got, wanted = getattr(actual, what), getattr(baseline, what)
        if got != wanted:
            raise Mismatch(f"{name} has {what} {got}; the contract says {wanted}")
    if actual.numel() == 0:
        return
    if not baseline.is_floating_point():
        wrong = int((actual != baseline).sum())
        if wrong:
            raise Mismatch(f"{name}: {wrong} of {actual.numel()} elements differ from the reference's")
        return
    actual, baseline = actual.to(truth.device), baseline.to(truth.device)
    finite = baseline.isfinite()
    odd = ~(finite | ((actual == baseline) | (actual.isnan() & baseline.isnan())))
    odd |= finite & ~actual.isfinite()
    if odd.any():
        at = tuple(int(i) for i in odd.nonzero()[0])
        raise Mismatch(
            f"{name}: {int(odd.sum())} of {actual.numel()} elements are NaN or infinite where the reference's are not, or "
            f"the other way round; first at {at}: {actual[at].item()}, not {baseline[at].item()}"
        )
    error, scale = _error(actual, truth, finite)
    base, _ = _error(baseline, truth, finite)
    eps = torch.finfo(baseline.dtype).eps
    allowed = 2 * base + units * eps * scale
    if error <= allowed:
        return
    if baseline.numel() <= FEW and other_draws is not None:
        errors, relative = [base], [base / scale if scale else 0.0]
        for other_baseline, other_truth in other_draws():
            other_baseline = other_baseline.to(other_truth.device)
            other_error, other_scale = _error(other_baseline, other_truth, other_baseline.isfinite())
            errors.append(other_error)
            relative.append(other_error / other_scale if other_scale else 0.0)
        allowed = 2 * max(max(errors), max(relative) * scale) + units * eps * scale
        if error <= allowed:
            return
    off = (actual.double() - truth).abs().where(finite, torch.zeros((), dtype=torch.float64, device=actual.device))
    at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
    raise Mismatch(
        f"{name}: error {error:.3g} is more than the {allowed:.3g} allowed (the reference's own in {baseline.dtype}: {base:.3g}, "
        f"largest value {scale:.3g}); worst at {at}: {actual[at].item():.9g}, truth {truth[at].item():.9g}"
    )


def check_reference(name: str, actual: Tensor | None, truth: Tensor | None, eps: float) -> None:
    """Check one output or gradient of the reference itself, which has no baseline.

    max|actual − truth| ≤ 64 · eps · max|truth|: what rounding at each step of a formula can add up to.

    Args:
        name: of the output, for the message.
        actual: what the reference gave in some dtype.
        truth: what it gives in float64.
        eps: of the coarsest dtype of the inputs.

    Raises:
        Mismatch: with what was allowed and what was found.
    """
    if actual is None or truth is None or not actual.is_floating_point() or actual.numel() == 0:
        return
    actual = actual.to(truth.device)
    error, scale = _error(actual, truth, actual.isfinite() & truth.isfinite())
    if not error <= 64 * eps * scale:
        raise Mismatch(
            f"{name}: error {error:.3g} is more than {64 * eps * scale:.3g}, 64 units of rounding of {scale:.3g}"
        )


def _error(value: Tensor, truth: Tensor, finite: Tensor) -> tuple[float, float]:
    """The largest distance from the truth, and the largest magnitude of the truth, where the reference is finite."""
    zero = torch.zeros((), dtype=torch.float64, device=value.device)
    distance = (value.double() - truth).where(finite, zero).abs().max()
    return distance.item(), truth.where(finite, zero).abs().max().item()


def _is(value: Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    if not left.is_floating_point():
        return torch.equal(left, right)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(whole), right.contiguous().view(whole))
