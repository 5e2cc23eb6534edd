"""Types of liger_core in an editor. Not run: pyright checks it, in `types` of .ci/run, and an error that is expected and isn't
there fails too.
"""
# pyright: strict, reportUnusedExpression=false, reportUnknownMemberType=false, reportUnnecessaryTypeIgnoreComment=error

from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import assert_type

import liger_core as liger
from liger_core import BackendInfo, CrossEntropyOutput
from liger_core.contract import Needs, Saved, implements

x, t = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
flag = cast(bool, ...)

# A call has the reference's signature.
assert_type(liger.rms_norm(x, None, 1e-6, offset=1.0), Tensor)
assert_type(liger.fused_add_rms_norm(x, x, x[0]), tuple[Tensor, Tensor])
liger.rms_norm(x, None, epsilon=1e-6)  # pyright: ignore[reportCallIssue]
liger.rms_norm([1.0], None)  # pyright: ignore[reportArgumentType]

# The flags decide what a cross-entropy returns.
liger.cross_entropy(x, t).backward()
liger.cross_entropy(x, t, None, ignore_index=0, softcap=None, return_z_loss=False).backward()
assert_type(liger.cross_entropy(x, t), Tensor)
assert_type(liger.cross_entropy(x, t, return_z_loss=True), CrossEntropyOutput)
assert_type(liger.cross_entropy(x, t, return_token_accuracy=True), CrossEntropyOutput)
assert_type(liger.cross_entropy(x, t, return_predicted_tokens=True, reduction="none"), CrossEntropyOutput)
assert_type(liger.cross_entropy(x, t, return_z_loss=flag), Tensor | CrossEntropyOutput)
liger.cross_entropy(x, t, return_z_loss=True).backward()  # pyright: ignore[reportAttributeAccessIssue]
liger.cross_entropy(x, t, smoothing=0.1)  # pyright: ignore[reportCallIssue]
assert_type(liger.fused_linear_cross_entropy(x, x, t, memory_budget=None), Tensor)
assert_type(liger.fused_linear_cross_entropy(x, x, t, return_z_loss=True).z_loss, Tensor | None)

# Functions that find an op keep its signature, if they get the op itself.
assert_type(liger.get_op(liger.rms_norm, language="triton")(x, None), Tensor)
liger.get_op(liger.rms_norm)(x)  # pyright: ignore[reportCallIssue]
assert_type(liger.get_op("rms_norm")(x), Any)
assert_type(liger.get_current_backend("cuda"), BackendInfo | None)
assert_type(liger.infer_device(), str)
assert_type(liger.list_overridden_ops(), list[str])


@liger.use("torch", rms_norm="triton")
def step(rows: int) -> str:
    """A decorated function keeps its signature."""
    return str(rows)


assert_type(step(3), str)
step("3")  # pyright: ignore[reportArgumentType]

with liger.use("torch") as demand:
    assert_type(demand, liger.use)

explanation = liger.explain(liger.rms_norm, x, None)
assert_type(explanation.chosen.language if explanation.chosen else None, str | None)


@implements(liger.rms_norm)
def forward(
    needs: Needs,
    x: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[Tensor, Saved]:
    """A kernel's forward has the contract's signature."""
    return x, ()


@implements(liger.rms_norm)  # pyright: ignore[reportArgumentType]
def misnamed(needs: Needs, x: Tensor, w: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Saved]:
    """`w` is called weight there, and the options are missing."""
    return x, ()


@implements(liger.cross_entropy)  # pyright: ignore[reportArgumentType]
def without_options(needs: Needs, logits: Tensor, target: Tensor) -> tuple[Tensor, Saved]:
    """The contract's signature is the reference's, also where calls have overloads."""
    return logits, ()
