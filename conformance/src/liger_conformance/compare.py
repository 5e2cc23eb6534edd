"""The rule that says whether a kernel is right: measured against float64, relative to PyTorch's own rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_conformance.rounding import Samples, error_and_scale


class Mismatch(AssertionError):
    """A kernel's output is wrong."""


def compare(
    name: str,
    actual: Tensor | None,
    baseline: Tensor | None,
    truth: Tensor | None,
    samples: Samples | None = None,
    *,
    units: int = 1,
    infinite: bool = False,
    by_row: bool = False,
    exact: bool = False,
) -> None:
    """Check one output or gradient.

    max|actual − truth| ≤ 2 · max|baseline − truth| + eps(dtype) · max|truth|, where `baseline` is the reference in the
    kernel's own dtype and `truth` the reference in float64 on the same inputs. Where the baseline has infinities or
    NaN, the kernel has the same; or is right, where the baseline overflows on its way to a truth that its dtype can hold. In
    what has NaN, the kernel may be NaN for infinity too.
    Where the truth is as near the least number that rounds to infinity as errors are, infinity counts as that number.
    Where the truth alone has, the kernel is finite and nothing more is known of it: the rule is that of the other elements.
    Integers are equal. Elements in 8 bits are the truth's, or its neighbours where a rounding decides: see `_compare_steps`.

    One baseline can be right by luck: where few roundings decide, as in a scalar, or in the one row of many that is badly
    conditioned. Where the kernel is over the bound, its error is the largest of several: see `Samples.errors`.

    Args:
        name: of the output, for the message.
        actual: what the kernel gave.
        baseline: what the reference gives in the same dtype.
        truth: what the reference gives in float64, there or on the CPU.
        samples: of what roundings do to the reference, with an entry of this name. Other errors are asked for where one
            baseline allows too little, and the baseline without a largest number where it overflows and the kernel doesn't.
        units: of rounding that are allowed beside the baseline's error, for what is known to round more often.
        infinite: an argument holds an infinity: whether infinities cancel, to NaN, is up to the order of a sum, so where
            the baseline has either the kernel has either.
        by_row: the rule holds for each row of the first dimension, whose scales differ.
        exact: the bits are those of the baseline.

    Raises:
        Mismatch: with what was allowed and what was found.
    """
    if actual is None or baseline is None or truth is None:
        if actual is not None or baseline is not None:
            raise Mismatch(f"{name} is {_is(actual)}; the contract says {_is(baseline)}")
        return
    for what in ("shape", "dtype", "device"):
        actually, contract = getattr(actual, what), getattr(baseline, what)
        if actually != contract:
            raise Mismatch(f"{name} has {what} {actually}; the contract says {contract}")
    if actual.numel() == 0:
        return
    if exact or not baseline.is_floating_point():
        differ = _bits(actual) != _bits(baseline)
        if wrong := int(differ.sum()):
            at = tuple(int(i) for i in differ.nonzero()[0])
            raise Mismatch(
                f"{name}: {wrong} of {actual.numel()} elements differ from the reference's; first at {at}: "
                f"{actual[at].item()}, not {baseline[at].item()}"
            )
        return
    actual, baseline = actual.to(truth.device), baseline.to(truth.device)
    if baseline.dtype is torch.float8_e4m3fn:
        _compare_steps(name, actual, baseline, truth)
        return
    dtype, kind = baseline.dtype, torch.finfo(baseline.dtype)
    if not infinite:
        actual, baseline = _bounded(actual, baseline, truth, kind, units)
    finite, overflowed = _finite(name, actual, baseline, truth, kind, infinite)
    # A baseline that is finite where the truth isn't has no error to measure there, and leaves no bound elsewhere.
    finite = finite & truth.isfinite()
    base, _ = error_and_scale(baseline, truth, finite, by_row)
    for judged in (finite, overflowed) if overflowed.any() else (finite,):
        if judged is overflowed and samples is not None and (value := samples.without_overflow[name]) is not None:
            base = torch.maximum(base, error_and_scale(value.to(truth.device), truth, overflowed, by_row)[0])
        error, _ = error_and_scale(actual, truth, judged, by_row)
        _, scale = error_and_scale(actual, truth, finite | judged, by_row)
        rounding = units * kind.eps * scale.clamp(min=kind.smallest_normal)
        allowed = 2 * base + rounding
        if samples is not None and not bool((error <= allowed).all()):
            errors = [sample.to(base.device) for sample in samples.errors[name]]
            allowed = 2 * torch.stack([base, *errors]).amax(0) + rounding
        if bool((error <= allowed).all()):
            continue
        row = int((error - allowed).argmax())
        where = f"of row {row} " if by_row else ""
        at = _worst(actual, truth, judged, row if by_row else None)
        raise Mismatch(
            f"{name}: error {where}{error[row].item():.3g} is more than the {allowed[row].item():.3g} allowed "
            f"(the reference's own in {dtype}: {base[row].item():.3g}, largest value {scale[row].item():.3g}); "
            f"worst at {at}: {actual[at].item():.9g}, truth {truth[at].item():.9g}"
        )


NEAR_THE_MIDDLE = 1000
"""Elements in 8 bits, of which one may lie so near the middle of two numbers that a rounding before decides."""


def _compare_steps(name: str, actual: Tensor, baseline: Tensor, truth: Tensor) -> None:
    """Check elements in 8 bits: NaN where the truth is, else at most one step from it, and that for few.

    As many may differ as twice those of the baseline, one of `NEAR_THE_MIDDLE`, and one.

    Raises:
        Mismatch: with the number that differ, and that are allowed to.
    """
    steps = (_order(actual) - _order(truth)).abs()
    allowed = 2 * int((_order(baseline) != _order(truth)).sum()) + 1 + truth.numel() // NEAR_THE_MIDDLE
    differ, worst = int((steps > 0).sum()), int(steps.max())
    if worst > 1 or differ > allowed:
        at = tuple(int(i) for i in torch.unravel_index(steps.argmax(), steps.shape))
        raise Mismatch(
            f"{name}: {differ} of {truth.numel()} elements in 8 bits differ from the truth's, {allowed} may by one step; "
            f"worst at {at}: {actual[at].item()}, truth {truth[at].item()}"
        )


def _order(value: Tensor) -> Tensor:
    """Numbers of float8 as integers in their order, one step apart; those of NaN lie two steps beyond the largest."""
    bits = value.contiguous().view(torch.uint8).int()
    magnitude = bits & 127
    magnitude = torch.where(magnitude == 127, 128, magnitude)
    return torch.where(bits > 127, -magnitude, magnitude)


def _finite(
    name: str, actual: Tensor, baseline: Tensor, truth: Tensor, kind: torch.finfo, infinite: bool
) -> tuple[Tensor, Tensor]:
    """Where the baseline is finite, and where it overflows on its way to a truth that the kernel may have right.

    Raises:
        Mismatch: the kernel has infinities or NaN where the baseline has none, or the other way round.
    """
    finite = baseline.isfinite()
    overflowed = ~finite
    if overflowed.any():
        overflowed &= (truth.abs() <= kind.max) & actual.isfinite()
    if infinite:
        odd = (finite | overflowed) != actual.isfinite()
    else:
        # If the baseline has NaN, infinity met numbers near 0. Those that it doesn't take for 0 give it infinity.
        same = (actual == baseline) | (actual.isnan() & ~finite & baseline.isnan().any())
        odd = ~(finite | overflowed | same)
        odd |= finite & ~actual.isfinite()
    if odd.any():
        at = tuple(int(i) for i in odd.nonzero()[0])
        raise Mismatch(
            f"{name}: {int(odd.sum())} of {actual.numel()} elements are NaN or infinite where the reference's are not, or "
            f"the other way round; first at {at}: {actual[at].item()}, not {baseline[at].item()}"
        )
    return finite, overflowed


def _worst(actual: Tensor, truth: Tensor, judged: Tensor, row: int | None) -> tuple[int, ...]:
    """The place of the largest error among the judged elements, of one row or of all."""
    distance = (actual.double() - truth).abs().where(judged, torch.zeros((), dtype=torch.float64, device=actual.device))
    if row is not None:
        distance[:row], distance[row + 1 :] = 0, 0
    return tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))


def check_reference(name: str, actual: Tensor | None, truth: Tensor | None, eps: float) -> None:
    """Check one output or gradient of the reference itself, which has no baseline.

    max|actual − truth| ≤ 64 · eps · max|truth|: what rounding at each step of a formula can add up to. Elements in 8 bits are at
    most one step from the truth's.

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
    if actual.dtype is torch.float8_e4m3fn:
        if (worst := int((_order(actual) - _order(truth)).abs().max())) > 1:
            raise Mismatch(f"{name}: an element in 8 bits is {worst} steps from the truth's")
        return
    error, scale = (value.item() for value in error_and_scale(actual, truth, actual.isfinite() & truth.isfinite()))
    if not error <= 64 * eps * scale:
        raise Mismatch(
            f"{name}: error {error:.3g} is more than {64 * eps * scale:.3g}, 64 units of rounding of {scale:.3g}"
        )


def _bounded(actual: Tensor, baseline: Tensor, truth: Tensor, kind: torch.finfo, units: int) -> tuple[Tensor, Tensor]:
    """Both, of which infinities count as the least number that rounds to one, where one baseline's error may decide that."""
    if actual.isfinite().all() and baseline.isfinite().all():
        return actual, baseline
    least = kind.max * (1 + kind.eps / 4)
    error, scale = error_and_scale(baseline, truth, baseline.isfinite() & truth.isfinite())
    near = (truth.abs() - least).abs() <= 2 * error + units * kind.eps * scale
    bound = least * truth.sign()

    def bounded(value: Tensor) -> Tensor:
        return bound.where(near & value.isinf() & (value.sign() == truth.sign()), value.double())

    return bounded(actual), bounded(baseline)


def _is(value: Tensor | None) -> str:
    return "None" if value is None else "a tensor"


def _bits(value: Tensor) -> Tensor:
    """The bits of floats, as integers; integers as they are."""
    if not value.is_floating_point():
        return value
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return value.contiguous().view(whole)


def same_bits(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    if left is None or right is None:
        return left is right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
    return torch.equal(_bits(left), _bits(right))
