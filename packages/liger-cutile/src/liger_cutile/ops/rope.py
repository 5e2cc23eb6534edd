"""Rotary embedding: a block takes all heads of q and k of some tokens, so it reads the tokens' angles once."""

import cuda.tile as ct
from torch import Tensor

from liger_core import rope
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._heads import like, load_heads, side_by_side, tiling, within_reach
from liger_cutile.ops._launch import ConstBool, ConstInt, given, launch
from liger_cutile.ops._rows import power_of_2


@ct.function
def rotate_heads(y1s, y2s, rest, x, cos1, cos2, sin1, sin2, COLUMNS, TILES, HEADS, TOKENS, HALF, REST, CHECK):
    """The heads of some tokens. `y1s`, `y2s` and `rest` are columns of one tensor, which no other block writes to."""
    x1s, x2s = x.slice(3, 0, COLUMNS // 2), x.slice(3, COLUMNS // 2, COLUMNS)
    for head in range(TILES):
        at = (ct.bid(1), head, ct.bid(0), 0)
        x1 = load_heads(x1s, at, (1, HEADS, TOKENS, HALF), CHECK)
        x2 = load_heads(x2s, at, (1, HEADS, TOKENS, HALF), CHECK)
        ct.store(y1s, at, ct.astype(x1 * cos1 - x2 * sin1, y1s.dtype), check_bounds=CHECK)
        ct.store(y2s, at, ct.astype(x2 * cos2 + x1 * sin2, y2s.dtype), check_bounds=CHECK)
        if given(rest):
            ct.store(rest, at, ct.load(x.slice(3, COLUMNS, x.shape[3]), at, (1, HEADS, TOKENS, REST)))


@ct.kernel(occupancy=4)
def _rotate(
    yq1, yq2, q_rest, yk1, yk2, k_rest, q, k, cos, sin,
    BACKWARD: ConstBool, BATCHED: ConstBool, CHECK: ConstBool, COLUMNS: ConstInt, TOKENS: ConstInt,
    Q_TILES: ConstInt, Q_HEADS: ConstInt, K_TILES: ConstInt, K_HEADS: ConstInt, HALF: ConstInt, REST: ConstInt,
):  # fmt: skip
    at = (ct.bid(1) if BATCHED else 0, ct.bid(0), 0)
    # A row of the tables serves all heads.
    shape = (1, 1, TOKENS, HALF)
    cos1 = ct.reshape(load_heads(cos.slice(2, 0, COLUMNS // 2), at, (1, TOKENS, HALF), CHECK), shape)
    cos2 = ct.reshape(load_heads(cos.slice(2, COLUMNS // 2, COLUMNS), at, (1, TOKENS, HALF), CHECK), shape)
    sin1 = ct.reshape(load_heads(sin.slice(2, 0, COLUMNS // 2), at, (1, TOKENS, HALF), CHECK), shape)
    sin2 = ct.reshape(load_heads(sin.slice(2, COLUMNS // 2, COLUMNS), at, (1, TOKENS, HALF), CHECK), shape)
    if BACKWARD:  # the transpose: by the negative angle, if both halves have the same angles
        sin1, sin2 = -sin2, -sin1
    if given(q):
        rotate_heads(yq1, yq2, q_rest, q, cos1, cos2, sin1, sin2, COLUMNS, Q_TILES, Q_HEADS, TOKENS, HALF, REST, CHECK)
    if given(k):
        rotate_heads(yk1, yk2, k_rest, k, cos1, cos2, sin1, sin2, COLUMNS, K_TILES, K_HEADS, TOKENS, HALF, REST, CHECK)


@opaque(writes=("yq", "yk"))
def _launch(
    yq: Tensor | None, yk: Tensor | None, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    results = side_by_side(yq), side_by_side(yk)
    for tensors in within_reach(*results, side_by_side(q), side_by_side(k), cos, sin):
        _launch_samples(*tensors, backward)
    for y, result in zip((yq, yk), results, strict=True):
        if y is not None and result is not None and result is not y:
            y.copy_(result)


def _launch_samples(
    yq: Tensor | None, yk: Tensor | None, q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    tables, _, columns = cos.shape
    batch, _, length, head_size = (k if q is None else q).shape
    rest = head_size - columns
    q_heads, k_heads = 1 if q is None else q.shape[1], 1 if k is None else k.shape[1]
    across, whole, tile = tiling(columns, rest, length, q_heads, k_heads)
    launch(
        _rotate, (across, batch), *column_parts(yq, columns), *column_parts(yk, columns), q, k, cos, sin,
        backward, tables > 1, not whole, columns, *tile, power_of_2(rest),
    )  # fmt: skip


def column_parts(y: Tensor | None, columns: int) -> tuple[Tensor | None, ...]:
    """The two halves that are rotated, and the rest, if there is any.

    As separate arrays they are written in any order. A kernel that got one tensor would wait for one half before it wrote the
    other.
    """
    if y is None:
        return None, None, None
    half, rest = columns // 2, y.shape[3] - columns
    if rest:
        return y.split_with_sizes((half, half, rest), 3)
    return *y.split_with_sizes((half, half), 3), None


@implements(rope)
def forward(needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor, Tensor], Saved]:
    yq, yk = like(q), like(k)
    _launch(yq, yk, q, k, cos, sin, False)
    return (yq, yk), (cos, sin) if True in needs else ()


def backward(needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    if dq is None and dk is None:
        return None, None
    yq, yk = like(dq, True), like(dk, True)
    _launch(yq, yk, dq, dk, *saved, True)
    return yq, yk
