"""Calls that distillation refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, randn


def _good(**changed: Any) -> dict[str, Any]:
    return {
        "student_logits": randn(3, 8),
        "teacher_logits": randn(3, 8),
        "labels": integers(0, 8, 3),
        **changed,
    }


def bad_options(good: Any) -> tuple[BadCall, ...]:
    """The options that every distillation refuses; `good` makes the arguments of a call."""

    def bad(id: str, error: type[Exception], says: tuple[str, ...], **changed: Any) -> BadCall:
        return BadCall(id, error, says, lambda: good(**changed))

    return (
        bad("unknown-divergence", ValueError, ("divergence", "'kl'", "'jsd'"), divergence="kl"),
        bad("beta-not-a-number", TypeError, ("beta", "'0.5'"), beta="0.5"),
        bad("negative-beta", ValueError, ("beta", "-0.1"), beta=-0.1),
        bad("beta-above-one", ValueError, ("beta", "1.1"), beta=1.1),
        bad("temperature-zero", ValueError, ("temperature", "0.0"), temperature=0.0),
        bad("temperature-not-a-number", TypeError, ("temperature", "None"), temperature=None),
        bad("negative-soft-weight", ValueError, ("soft_weight", "-1.0"), soft_weight=-1.0),
        bad("hard-weight-not-a-number", TypeError, ("hard_weight", "None"), hard_weight=None),
        bad("hard-weight-without-labels", ValueError, ("hard_weight", "0.5", "labels"), hard_weight=0.5, labels=None),
        bad("student-softcap-zero", ValueError, ("student_softcap", "0.0"), student_softcap=0.0),
        bad("teacher-softcap-a-string", TypeError, ("teacher_softcap", "'30'"), teacher_softcap="30"),
        bad("ignore-index-not-an-int", TypeError, ("ignore_index", "None"), ignore_index=None),
        bad("unknown-reduction", ValueError, ("reduction", "'batchmean'", "'mean'"), reduction="batchmean"),
        bad("items-a-string", TypeError, ("num_items_in_batch", "'7'"), num_items_in_batch="7"),
        bad("items-of-two", ValueError, ("num_items_in_batch", "(2,)"), num_items_in_batch=torch.ones(2)),
        BadCall("float-labels", TypeError, ("labels", "float32"), lambda: good(labels=randn(3))),
        BadCall(
            "short-labels",
            ValueError,
            ("labels", "(2,)", "(3,)"),
            lambda: good(labels=integers(0, 8, 2)),
        ),
    )


BAD = (
    *bad_options(_good),
    *(
        BadCall(
            f"integer-{name.replace('_', '-')}",
            TypeError,
            (name, "int64"),
            lambda name=name: _good(**{name: _good()[name].long()}),
        )
        for name in ("student_logits", "teacher_logits")
    ),
    BadCall(
        "vector-student-logits",
        ValueError,
        ("student_logits", "1 dimensions"),
        lambda: _good(student_logits=randn(8)),
    ),
    BadCall(
        "teacher-of-another-vocabulary",
        ValueError,
        ("teacher_logits", "(3, 9)", "(3, 8)", "slice"),
        lambda: _good(teacher_logits=randn(3, 9)),
    ),
    BadCall(
        "no-columns",
        ValueError,
        ("student_logits", "(3, 0)"),
        lambda: _good(student_logits=randn(3, 0), teacher_logits=randn(3, 0)),
    ),
    BadCall(
        "label-too-large",
        IndexError,
        ("labels", "8", "0 to 7"),
        lambda: _good(labels=integers(8, 9, 3), hard_weight=1.0),
    ),
)
