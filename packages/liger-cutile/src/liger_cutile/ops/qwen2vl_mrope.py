"""Multimodal rotary embedding: a block takes all heads of some tokens, so it reads each column's plane once."""

from collections.abc import Sequence

import cuda.tile as ct
from torch import Tensor

from liger_core import qwen2vl_mrope
from liger_core.contract import Needs, Saved, implements
from liger_core.custom_op import opaque
from liger_cutile.ops._heads import far_apart, like, side_by_side, tiling, within_reach
from liger_cutile.ops._launch import MOST_DOWN, ConstBool, ConstInt, given, launch
from liger_cutile.ops.rope import column_parts, rotate_heads


@ct.function
def _load_angles(table, batch, token, plane, column, CHECK):
    """The cosines or sines of one half, in float32, each column's from its plane."""
    angles = ct.gather(table, (plane, batch, token, column), check_bounds=CHECK)
    return ct.astype(angles, ct.float32)


@ct.kernel(occupancy=6)
def _rotate(
    yq1, yq2, yk1, yk2, q, k, cos, sin,
    BACKWARD: ConstBool, BATCHED: ConstBool, CHECK: ConstBool, TIME: ConstInt, HEIGHT: ConstInt, COLUMNS: ConstInt,
    TOKENS: ConstInt, Q_TILES: ConstInt, Q_HEADS: ConstInt, K_TILES: ConstInt, K_HEADS: ConstInt, HALF: ConstInt,
):  # fmt: skip
    batch = ct.bid(1) if BATCHED else 0
    token = ct.reshape(ct.bid(0) * TOKENS + ct.arange(TOKENS, dtype=ct.int32), (1, 1, TOKENS, 1))
    column = ct.reshape(ct.arange(HALF, dtype=ct.int32), (1, 1, 1, HALF))
    plane = ct.where(column < TIME, 0, ct.where(column < TIME + HEIGHT, 1, 2))
    cos1 = _load_angles(cos, batch, token, plane, column, CHECK)
    cos2 = _load_angles(cos, batch, token, plane, COLUMNS // 2 + column, CHECK)
    sin1 = _load_angles(sin, batch, token, plane, column, CHECK)
    sin2 = _load_angles(sin, batch, token, plane, COLUMNS // 2 + column, CHECK)
    if BACKWARD:  # the transpose: by the negative angle, if both halves have the same angles
        sin1, sin2 = -sin2, -sin1
    if given(q):
        rotate_heads(yq1, yq2, (), q, cos1, cos2, sin1, sin2, COLUMNS, Q_TILES, Q_HEADS, TOKENS, HALF, 0, CHECK)
    if given(k):
        rotate_heads(yk1, yk2, (), k, cos1, cos2, sin1, sin2, COLUMNS, K_TILES, K_HEADS, TOKENS, HALF, 0, CHECK)


@opaque(writes=("yq", "yk"))
def _launch(
    yq: Tensor | None,
    yk: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    mrope_section: Sequence[int],
    backward: bool,
) -> None:
    samples = (k if q is None else q).shape[0]
    if samples <= MOST_DOWN and not far_apart(yq, yk, q, k, cos, sin):
        _launch_samples(yq, yk, q, k, cos, sin, mrope_section, backward)
        return
    for *heads, part_cos, part_sin in within_reach(
        yq, yk, side_by_side(q), side_by_side(k), cos.transpose(0, 1), sin.transpose(0, 1)
    ):
        _launch_samples(*heads, part_cos.transpose(0, 1), part_sin.transpose(0, 1), mrope_section, backward)


def _launch_samples(
    yq: Tensor | None,
    yk: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    mrope_section: Sequence[int],
    backward: bool,
) -> None:
    batch, _, length, columns = (k if q is None else q).shape
    q_heads, k_heads = 1 if q is None else q.shape[1], 1 if k is None else k.shape[1]
    across, whole, tile = tiling(columns, 0, length, q_heads, k_heads)
    launch(
        _rotate, (across, batch), *column_parts(yq, columns)[:2], *column_parts(yk, columns)[:2], q, k, cos, sin,
        backward, cos.shape[1] > 1, not whole, mrope_section[0], mrope_section[1], columns, *tile,
    )  # fmt: skip


@implements(qwen2vl_mrope)
def forward(
    needs: Needs, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[tuple[Tensor, Tensor], Saved]:
    yq, yk = like(q), like(k)
    _launch(yq, yk, q, k, cos, sin, mrope_section, False)
    return (yq, yk), (cos, sin) if True in needs else ()


def backward(
    needs: Needs, saved: Saved, dq: Tensor | None, dk: Tensor | None, *, mrope_section: Sequence[int]
) -> tuple[Tensor | None, ...]:
    needs_q, needs_k = needs
    dq, dk = dq if needs_q else None, dk if needs_k else None
    if dq is None and dk is None:
        return None, None
    yq, yk = like(dq, True), like(dk, True)
    _launch(yq, yk, dq, dk, *saved, mrope_section, True)
    return yq, yk
