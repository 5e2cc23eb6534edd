"""Calls that cross_entropy refuses."""

from collections.abc import Callable
from typing import Any

import torch

from op_calls import BadCall, integers, randn


def bad_options(arguments: Callable[[], dict[str, Any]]) -> tuple[BadCall, ...]:
    """Each option of a cross-entropy with a value that it doesn't take, beside good `arguments`."""

    def bad(id: str, error: type[Exception], says: tuple[str, ...], **option: Any) -> BadCall:
        return BadCall(id, error, (*option, *says), lambda: {**arguments(), **option})

    return (
        bad("ignore-index-not-an-int", TypeError, ("-1.0",), ignore_index=-1.0),
        bad("smoothing-not-a-number", TypeError, ("'0.1'",), label_smoothing="0.1"),
        bad("negative-smoothing", ValueError, ("-0.1",), label_smoothing=-0.1),
        bad("smoothing-above-one", ValueError, ("1.1",), label_smoothing=1.1),
        bad("z-loss-scale-not-a-number", TypeError, ("None",), lse_square_scale=None),
        bad("softcap-not-a-number", TypeError, ("'30'",), softcap="30"),
        bad("softcap-zero", ValueError, ("0.0",), softcap=0.0),
        bad("unknown-reduction", ValueError, ("'batchmean'", "'mean'"), reduction="batchmean"),
        bad("z-loss-flag-not-a-bool", TypeError, ("1",), return_z_loss=1),
        bad("accuracy-flag-not-a-bool", TypeError, ("1",), return_token_accuracy=1),
        bad("predicted-flag-not-a-bool", TypeError, ("None",), return_predicted_tokens=None),
    )


def _good(**changed: Any) -> dict[str, Any]:
    return {"logits": randn(3, 8), "target": integers(0, 8, 3), **changed}


def _labels(*values: int) -> dict[str, Any]:
    target = integers(0, 1, len(values)) + torch.tensor(values)
    return _good(target=target)


BAD = (
    BadCall("integer-logits", TypeError, ("logits", "int64"), lambda: _good(logits=integers(0, 9, 3, 8))),
    BadCall("logits-not-a-tensor", TypeError, ("logits", "list"), lambda: _good(logits=[[1.0] * 8] * 3)),
    BadCall("batched-logits", ValueError, ("logits", "3 dimensions"), lambda: _good(logits=randn(1, 3, 8))),
    BadCall("no-classes", ValueError, ("logits", "(3, 0)"), lambda: _good(logits=randn(3, 0))),
    BadCall("float-target", TypeError, ("target", "float32"), lambda: _good(target=randn(3))),
    BadCall("int32-target", TypeError, ("target", "int32"), lambda: _good(target=_good()["target"].int())),
    BadCall("short-target", ValueError, ("target", "(2,)", "(3,)"), lambda: _good(target=integers(0, 8, 2))),
    BadCall("integer-weight", TypeError, ("weight", "int64"), lambda: _good(weight=integers(0, 9, 8))),
    BadCall("short-weight", ValueError, ("weight", "(7,)", "(8,)"), lambda: _good(weight=randn(7))),
    *bad_options(_good),
    BadCall("label-too-high", IndexError, ("target", "8", "0 to 7", "-100"), lambda: _labels(1, 8, -100)),
    BadCall("negative-label", IndexError, ("target", "-1"), lambda: _labels(1, -1, -100)),
    BadCall("far-label", IndexError, ("target", str(1 << 40)), lambda: _labels(1, 2, 1 << 40)),
)
