"""Each op's `dimensions` holds: it is called on the parts of its cases, in one process; and a wrong one doesn't pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from liger_conformance.case import MetaMake, cases_of
from liger_conformance.dividing import check_divided, declared, divisible, ends_of, place_of_rows, select_rows
from liger_conformance.evaluate import complete
from liger_core import rms_norm
from liger_core.contract import Op, ops
from liger_core.dimensions import independent, parse

FEW = 600_000_000
"""Elements of the rows that are checked of a huge case: 4.8 GB in float64. Backward takes some times as much."""

LARGEST = 1 << 12
"""Elements of an argument: a case of more is for a kernel's branches, and the reference has none."""


def calls(op: Op[..., Any]) -> Iterator[dict[str, Any]]:
    """The arguments of an op's small cases; with a `reduction`, that whose results are declared, and once the sum."""
    known, summed = cases_of(op.name), "reduction" not in op.options
    for case in known.cases:
        if case.group in ("odd", "edge", "option") and not case.holds:
            arguments = known.build(case, torch.float64, "cpu")
            tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
            if max(tensor.numel() for tensor in tensors) > LARGEST:
                continue
            if not summed and takes_sum(op, arguments):
                yield arguments | {"reduction": "sum"}
                summed = True
            yield arguments | ({"reduction": "none"} if "reduction" in op.options else {})


def takes_sum(op: Op[..., Any], arguments: dict[str, Any]) -> bool:
    """Whether an op has ``reduction="sum"``, which grpo_loss has not."""
    op.examine(op.bind((), arguments | {"reduction": "none"}))
    try:
        op.examine(op.bind((), arguments | {"reduction": "sum"}))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(ops))
def test_parts_are_those_of_the_whole(name: str) -> None:
    """Results and gradients, over every name that is declared independent; and there is a case that has it."""
    op, divided = ops[name], set()
    for arguments in calls(op):
        for over in divisible(op, arguments):
            check_divided(op, arguments, over)
            divided.add(over.rstrip("0123456789"))
    written = {part for names in declared(op).tensors.values() for part in names if independent(part)}
    assert divided == {part.rstrip("'") for part in written}, "no case has more than one element of the others"


@pytest.mark.parametrize("name", [name for name in sorted(ops) if cases_of(name).huge])
def test_the_ends_of_a_huge_case_are_small(name: str) -> None:
    """Four rows, not all of them, are computed in float64; a GPU alone runs the case, and may run out of memory."""
    op, op_cases = ops[name], cases_of(name)
    assert op_cases.huge is not None
    arguments = complete(op, op_cases.make(op_cases.huge, MetaMake(torch.bfloat16, "meta")))
    rows = place_of_rows(op, arguments)
    few = select_rows(arguments, rows.arguments, ends_of(rows, "meta"))
    assert rows.number >= 8, f"{rows.number} rows have no four ends"
    assert sum(few[name].numel() for name in rows.arguments) <= FEW


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("rms_norm", "x: ... h, weight: h -> ... h", "divided over h: result"),
        ("softmax", "x: ... v -> ... v", "divided over v: result"),
        ("rope", "q: b h S d, k: b h' S d, cos: b S d, sin: b S d -> b h S d, b h' S d", "divided over d: result 0"),
        ("fused_neighborhood_attention", "q: b h s D, k: b h s D, v: b h s D -> b h s D", "divided over s: result"),
        ("jsd", "student_logprobs: n v, teacher_logprobs: n v, labels: n -> ", "divided over n: result"),
        ("cross_entropy", "logits: n v, target: n, weight: v -> n, n, n, n", "divided over v: loss"),
        ("kl_div", "log_pred: n v, target: n v -> n", "n is declared; a tensor has 2 dimensions"),
    ],
)
def test_a_wrong_declaration_fails(name: str, line: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = ops[name]
    monkeypatch.setattr(op, "dimensions", parse(line, name, op.tensors, op.options, None))

    def all_of_them() -> None:
        for arguments in calls(op):
            for over in divisible(op, arguments):
                check_divided(op, arguments, over)

    with pytest.raises((AssertionError, ValueError), match=says):
        all_of_them()


def test_an_op_without_a_declaration_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "dimensions", None)
    with pytest.raises(AssertionError, match="rms_norm doesn't say .*@op takes dimensions=\"x: ... H"):
        declared(rms_norm)
