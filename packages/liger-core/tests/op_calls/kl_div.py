"""Calls that kl_div refuses."""

from typing import Any

from op_calls import BadCall, integers, randn, uniform


def _good(**changed: Any) -> dict[str, Any]:
    return {"log_pred": randn(3, 8).log_softmax(-1), "target": uniform(3, 8), **changed}


BAD = (
    BadCall(
        "integer-log-pred",
        TypeError,
        ("log_pred", "int64"),
        lambda: _good(log_pred=integers(0, 9, 3, 8)),
    ),
    BadCall("integer-target", TypeError, ("target", "int64"), lambda: _good(target=integers(0, 9, 3, 8))),
    BadCall("target-not-a-tensor", TypeError, ("target", "list"), lambda: _good(target=[[1.0] * 8] * 3)),
    BadCall("vector-log-pred", ValueError, ("log_pred", "1 dimensions"), lambda: _good(log_pred=randn(8))),
    BadCall("narrow-target", ValueError, ("target", "(3, 7)", "(3, 8)"), lambda: _good(target=randn(3, 7))),
    BadCall(
        "unknown-reduction",
        ValueError,
        ("reduction", "'average'", "'batchmean'"),
        lambda: _good(reduction="average"),
    ),
    BadCall("log-target-not-a-bool", TypeError, ("log_target", "1"), lambda: _good(log_target=1)),
    BadCall("eps-not-a-number", TypeError, ("eps", "None"), lambda: _good(eps=None)),
    BadCall("negative-eps", ValueError, ("eps", "-1e-10"), lambda: _good(eps=-1e-10)),
)
