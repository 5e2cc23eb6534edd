"""Each op refuses the calls that are in `BAD` of its file in `op_calls`, and says why."""

from importlib import import_module
from pathlib import Path

import op_calls
import pytest
from op_calls import BadCall

import liger_core
from liger_core.contract import ops

OPS = sorted(file.stem for file in Path(op_calls.__file__).parent.glob("[!_]*.py"))

CALLS = [(op, call) for op in OPS for call in import_module(f"op_calls.{op}").BAD]


@pytest.mark.parametrize(("op", "call"), [pytest.param(op, call, id=f"{op}-{call.id}") for op, call in CALLS])
def test_bad_input(op: str, call: BadCall) -> None:
    with liger_core.use("torch"), pytest.raises(call.error) as caught:
        ops[op](**call.build())
    assert type(caught.value) is call.error
    for word in (op, *call.says):
        assert word in str(caught.value), f"the message doesn't say {word!r}"


def test_every_op_refuses_some_call() -> None:
    lacking = {*ops} - {op for op, _ in CALLS}
    assert not lacking, f"add calls to BAD in packages/liger-core/tests/op_calls/: {', '.join(sorted(lacking))}.py"
    ids = [(op, call.id) for op, call in CALLS]
    assert len(ids) == len({*ids}), "an id is there twice"
