"""Calls that fused_linear_kl_div refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn, uniform


def _good(**changed: Any) -> dict[str, Any]:
    return {"x": randn(3, 4), "linear_weight": randn(8, 4), "target": uniform(3, 8), **changed}


def _chunks(memory_budget: object) -> dict[str, Any]:
    return {**_good(), "linear_weight": randn(8, 4).requires_grad_(), "memory_budget": memory_budget}


BAD = (
    *(
        BadCall(
            f"integer-{name.replace('_', '-')}",
            TypeError,
            (name, "int64"),
            lambda name=name: _good(**{name: _good()[name].long()}),
        )
        for name in ("x", "linear_weight", "target")
    ),
    BadCall(
        "weight-of-another-dtype",
        TypeError,
        ("linear_weight", "float16", "x", "float32"),
        lambda: _good(linear_weight=randn(8, 4, dtype=torch.float16)),
    ),
    BadCall("target-not-a-tensor", TypeError, ("target", "list"), lambda: _good(target=[[1.0] * 8] * 3)),
    BadCall("vector-x", ValueError, ("x", "1 dimensions"), lambda: _good(x=randn(4))),
    BadCall(
        "narrow-linear-weight",
        ValueError,
        ("linear_weight", "(8, 3)", "(8, 4)"),
        lambda: _good(linear_weight=randn(8, 3)),
    ),
    BadCall(
        "no-classes",
        ValueError,
        ("linear_weight", "(0, 4)"),
        lambda: _good(linear_weight=randn(0, 4)),
    ),
    BadCall("narrow-target", ValueError, ("target", "(3, 7)", "(3, 8)"), lambda: _good(target=randn(3, 7))),
    BadCall("short-target", ValueError, ("target", "(2, 8)", "(3, 8)"), lambda: _good(target=randn(2, 8))),
    BadCall("float-labels", TypeError, ("labels", "float32"), lambda: _good(labels=randn(3))),
    BadCall("short-labels", ValueError, ("labels", "(2,)", "(3,)"), lambda: _good(labels=integers(0, 8, 2))),
    BadCall("short-bias", ValueError, ("bias", "(7,)", "(8,)"), lambda: _good(bias=randn(7))),
    BadCall("integer-bias", TypeError, ("bias", "int64"), lambda: _good(bias=integers(0, 8, 8))),
    BadCall("log-target-not-a-bool", TypeError, ("log_target", "1"), lambda: _good(log_target=1)),
    BadCall("temperature-zero", ValueError, ("temperature", "0.0"), lambda: _good(temperature=0.0)),
    BadCall("negative-softcap", ValueError, ("softcap", "-1.0"), lambda: _good(softcap=-1.0)),
    BadCall("eps-not-a-number", TypeError, ("eps", "None"), lambda: _good(eps=None)),
    BadCall("negative-eps", ValueError, ("eps", "-1e-10"), lambda: _good(eps=-1e-10)),
    BadCall(
        "unknown-reduction",
        ValueError,
        ("reduction", "'average'", "'batchmean'"),
        lambda: _good(reduction="average"),
    ),
    BadCall("ignore-index-a-float", TypeError, ("ignore_index", "1.5"), lambda: _good(ignore_index=1.5)),
    BadCall("accum-dtype-a-string", TypeError, ("accum_dtype", "'fp32'"), lambda: _good(accum_dtype="fp32")),
    BadCall("budget-not-an-int", TypeError, ("memory_budget", "1000000.0"), lambda: _chunks(1e6)),
    # As in fused_linear_cross_entropy: all three rows are 2 · 3 · 8 · 4 bytes of logits, or one column of them is less.
    BadCall("budget-too-small", ValueError, ("memory_budget", "1;", "at least"), lambda: _chunks(1)),
)
