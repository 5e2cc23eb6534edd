"""Calls that logit_statistics refuses."""

from collections.abc import Callable
from typing import Any

import torch

from op_calls import BadCall, integers, randn


def bad_options(arguments: Callable[[], dict[str, Any]]) -> tuple[BadCall, ...]:
    """Each option of the statistics with a value that it doesn't take, beside good `arguments`."""

    def bad(id: str, error: type[Exception], says: tuple[str, ...], **option: Any) -> BadCall:
        return BadCall(id, error, (*option, *says), lambda: {**arguments(), **option})

    return (
        bad("first-not-an-int", TypeError, ("1.0",), first=1.0),
        bad("negative-first", ValueError, ("-1",), first=-1),
        bad("ignore-index-not-an-int", TypeError, ("-1.0",), ignore_index=-1.0),
        bad("softcap-zero", ValueError, ("0.0",), softcap=0.0),
        bad("temperature-zero", ValueError, ("0",), temperature=0),
        bad("temperature-not-a-number", TypeError, ("None",), temperature=None),
        bad("entropy-flag-not-a-bool", TypeError, ("1",), return_entropy=1),
        bad("total-flag-not-a-bool", TypeError, ("1",), return_total=1),
        bad("squares-flag-not-a-bool", TypeError, ("'no'",), return_log_sum_squares="no"),
        bad("best-flag-not-a-bool", TypeError, ("None",), return_best=None),
    )


def bad_targets(arguments: Callable[..., dict[str, Any]]) -> tuple[BadCall, ...]:
    """Targets that don't fit the three rows of good `arguments`."""
    return (
        BadCall("float-target", TypeError, ("target", "float32"), lambda: arguments(target=randn(3))),
        BadCall(
            "int32-target",
            TypeError,
            ("target", "int32"),
            lambda: arguments(target=integers(0, 8, 3, dtype=torch.int32)),
        ),
        BadCall(
            "short-target",
            ValueError,
            ("target", "(2,)", "(3,)"),
            lambda: arguments(target=integers(0, 8, 2)),
        ),
        BadCall(
            "no-target-of-a-row",
            ValueError,
            ("target", "(3, 0)", "(3, K)"),
            lambda: arguments(target=integers(0, 8, 3, 0)),
        ),
        BadCall(
            "three-dimensions-of-target",
            ValueError,
            ("target", "3 dimensions"),
            lambda: arguments(target=integers(0, 8, 3, 1, 1)),
        ),
    )


def _good(**changed: Any) -> dict[str, Any]:
    return {"logits": randn(3, 8), "target": integers(0, 8, 3), **changed}


BAD = (
    BadCall("integer-logits", TypeError, ("logits", "int64"), lambda: _good(logits=integers(0, 9, 3, 8))),
    BadCall("logits-not-a-tensor", TypeError, ("logits", "list"), lambda: _good(logits=[[1.0] * 8] * 3)),
    BadCall("batched-logits", ValueError, ("logits", "3 dimensions"), lambda: _good(logits=randn(1, 3, 8))),
    BadCall("no-classes", ValueError, ("logits", "(3, 0)"), lambda: _good(logits=randn(3, 0))),
    *bad_targets(_good),
    BadCall("integer-weight", TypeError, ("weight", "int64"), lambda: _good(weight=integers(0, 9, 8))),
    BadCall("short-weight", ValueError, ("weight", "(7,)", "(8,)"), lambda: _good(weight=randn(7))),
    *bad_options(_good),
)
