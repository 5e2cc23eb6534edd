"""Whole cuTile kernels in the interpreter, against PyTorch: what training kernels are made of, and the rest of the language.

Every check is on. test_interpreter_tileir_mutations.py breaks these kernels one by one.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from liger_conformance.interpreters import tileir

ct = pytest.importorskip("cuda.tile")
if os.environ.get("CUTILE_INTERPRET") != "1":
    pytest.skip("needs CUTILE_INTERPRET=1", allow_module_level=True)
tileir.install()

ConstInt = ct.Constant[int]
ZERO, NEG_INF = ct.PaddingMode.ZERO, ct.PaddingMode.NEG_INF
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1.6e-2, 1e-3)}

each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def everything_checked():
    torch.manual_seed(0)
    with tileir.tracking():
        yield


def launch(grid, kernel, *arguments):
    ct.launch(0, grid if isinstance(grid, tuple) else (grid,), kernel, arguments)


def close(actual, expected, dtype=torch.float32):
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=rtol, atol=atol)


def power_of_2(size):
    return 1 << (size - 1).bit_length()


@ct.kernel
def norm_forward(x, weight, y, inverse_rms, eps: ct.Constant[float], COLUMNS: ConstInt, BLOCK: ConstInt):
    row = ct.bid(0)
    xs = ct.astype(ct.load(x, (row, 0), (1, BLOCK), padding_mode=ZERO), ct.float32)
    r = ct.rsqrt(ct.sum(xs * xs, axis=1, keepdims=True) / COLUMNS + eps)
    ct.store(inverse_rms, (row,), ct.reshape(r, (1,)))
    ws = ct.astype(ct.load(weight, (0,), (BLOCK,), padding_mode=ZERO), ct.float32)
    ct.store(y, (row, 0), ct.astype(xs * r * ct.reshape(ws, (1, BLOCK)), y.dtype))


@ct.kernel
def norm_backward(
    dy, x, weight, inverse_rms, dx, dweight, rows, COLUMNS: ConstInt, BLOCK: ConstInt, ATOMIC: ct.Constant[bool]
):
    """Rows by turns. dweight is [blocks, COLUMNS], a sum per block, or [COLUMNS], added up by atomics."""
    block = ct.bid(0)
    ws = ct.reshape(ct.astype(ct.load(weight, (0,), (BLOCK,), padding_mode=ZERO), ct.float32), (1, BLOCK))
    sums = ct.zeros((1, BLOCK), ct.float32)
    for row in range(block, rows, ct.num_blocks(0)):
        xs = ct.astype(ct.load(x, (row, 0), (1, BLOCK), padding_mode=ZERO), ct.float32)
        dys = ct.astype(ct.load(dy, (row, 0), (1, BLOCK), padding_mode=ZERO), ct.float32)
        r = ct.reshape(ct.load(inverse_rms, (row,), (1,)), (1, 1))
        normed = xs * r
        g = dys * ws
        mean = ct.sum(g * normed, axis=1, keepdims=True) / COLUMNS
        ct.store(dx, (row, 0), ct.astype((g - normed * mean) * r, dx.dtype))
        sums = sums + dys * normed
    if ATOMIC:
        ct.atomic_add(dweight, ct.arange(BLOCK, dtype=ct.int32), ct.reshape(sums, (BLOCK,)))
    else:
        ct.store(dweight, (block, 0), sums)


def check_norm(dtype, rows, columns, atomic):
    x = torch.randn(rows, columns).to(dtype).requires_grad_()
    weight = (1 + torch.randn(columns) / 8).to(dtype).requires_grad_()
    dy, blocks = torch.randn(rows, columns).to(dtype), 3
    y, inverse_rms, dx = (
        torch.empty(rows, columns, dtype=dtype),
        torch.empty(rows),
        torch.empty(rows, columns, dtype=dtype),
    )
    size = power_of_2(columns)
    launch(rows, norm_forward, x.detach(), weight.detach(), y, inverse_rms, 1e-6, columns, size)
    expected = F.rms_norm(x.float(), (columns,), weight.float(), 1e-6)
    expected.backward(dy.float())
    close(y, expected.detach(), dtype)
    dweight = torch.zeros(columns) if atomic else torch.empty(blocks, columns)
    launch(
        blocks, norm_backward, dy, x.detach(), weight.detach(), inverse_rms, dx, dweight, rows, columns, size, atomic
    )  # fmt: skip
    close(dx, x.grad, dtype)
    close(dweight if atomic else dweight.sum(0), weight.grad, dtype)


@each_dtype
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(5, 100), (8, 128)])
def test_norm(dtype, rows, columns, atomic):
    check_norm(dtype, rows, columns, atomic)


@ct.kernel
def softmax(x, y, BLOCK: ConstInt):
    row, tiles = ct.bid(0), ct.num_tiles(x, axis=1, shape=(1, BLOCK))
    most = ct.full((1, 1), -float("inf"), ct.float32)
    total = ct.zeros((1, 1), ct.float32)
    for column in range(tiles):
        xs = ct.astype(ct.load(x, (row, column), (1, BLOCK), padding_mode=NEG_INF), ct.float32)
        higher = ct.maximum(most, ct.max(xs, axis=1, keepdims=True))
        total = total * ct.exp(most - higher) + ct.sum(ct.exp(xs - higher), axis=1, keepdims=True)
        most = higher
    for column in range(tiles):
        xs = ct.astype(ct.load(x, (row, column), (1, BLOCK), padding_mode=NEG_INF), ct.float32)
        ct.store(y, (row, column), ct.astype(ct.exp(xs - most) / total, y.dtype))


@each_dtype
@pytest.mark.parametrize(("columns", "block"), [(100, 32), (257, 64), (64, 64)])
def test_softmax(dtype, columns, block):
    x = torch.randn(3, columns).to(dtype) * 4
    y = torch.empty_like(x)
    launch(3, softmax, x, y, block)
    close(y, torch.softmax(x.float(), 1), dtype)


@ct.kernel
def cross_entropy(x, target, loss, ignore_index, columns, BLOCK: ConstInt):
    row = ct.bid(0)
    label = ct.load(target, (row,), ())
    if label == ignore_index:
        ct.store(loss, (row,), 0.0)
    else:
        most = ct.full((1, 1), -float("inf"), ct.float32)
        total = ct.zeros((1, 1), ct.float32)
        for column in range(ct.cdiv(columns, BLOCK)):
            xs = ct.astype(ct.load(x, (row, column), (1, BLOCK), padding_mode=NEG_INF), ct.float32)
            higher = ct.maximum(most, ct.max(xs, axis=1, keepdims=True))
            total = total * ct.exp(most - higher) + ct.sum(ct.exp(xs - higher), axis=1, keepdims=True)
            most = higher
        logit = ct.astype(ct.gather(x, (row, label)), ct.float32)
        ct.store(loss, (row,), ct.reshape(most + ct.log(total), ()) - logit)


def check_cross_entropy(dtype, columns, block):
    x = (torch.randn(6, columns) * 3).to(dtype)
    x[:, -1] = 9.0  # a loop that stops early loses the most
    target = torch.randint(0, columns, (6,))
    target[2] = -100
    loss = torch.empty(6)
    launch(6, cross_entropy, x, target, loss, -100, columns, block)
    close(loss, F.cross_entropy(x.float(), target, reduction="none"))


@each_dtype
@pytest.mark.parametrize(("columns", "block"), [(1000, 256), (513, 128)])
def test_cross_entropy(dtype, columns, block):
    check_cross_entropy(dtype, columns, block)


@ct.kernel
def gated(gate, up, y, BLOCK: ConstInt):
    row, column = ct.bid(0), ct.bid(1)
    a = ct.astype(ct.load(gate, (row, column), (1, BLOCK), padding_mode=ZERO), ct.float32)
    us = ct.astype(ct.load(up, (row, column), (1, BLOCK), padding_mode=ZERO), ct.float32)
    ct.store(y, (row, column), ct.astype(a / (1.0 + ct.exp(-a)) * us, y.dtype))


@each_dtype
def test_gated(dtype):
    gate, up = torch.randn(5, 300).to(dtype), torch.randn(5, 300).to(dtype)
    y = torch.empty_like(gate)
    launch((5, 3), gated, gate, up, y, 128)
    close(y, F.silu(gate.float()) * up.float(), dtype)


@ct.kernel
def matmul(a, b, c, M: ConstInt, N: ConstInt, K: ConstInt):
    row, column = ct.bid(0), ct.bid(1)
    sums = ct.zeros((M, N), ct.float32)
    for k in range(ct.num_tiles(a, axis=1, shape=(M, K))):
        left = ct.load(a, (row, k), (M, K), padding_mode=ZERO)
        right = ct.load(b, (k, column), (K, N), padding_mode=ZERO)
        sums = ct.mma(left, right, sums)
    ct.store(c, (row, column), ct.astype(sums, c.dtype))


def check_matmul(dtype, m, n, k, magnitude=1.0):
    a, b = torch.rand(m, k).to(dtype) * magnitude, torch.rand(k, n).to(dtype)
    c = torch.empty(m, n, dtype=dtype)
    launch((-(-m // 32), -(-n // 32)), matmul, a, b, c, 32, 32, 32)
    close(c, (a.double() @ b.double()).to(dtype), dtype)


@each_dtype
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (50, 70, 90)])
def test_matmul(dtype, m, n, k):
    check_matmul(dtype, m, n, k)


def test_matmul_of_strided_inputs():
    a, b, c = torch.randn(64, 48).t(), torch.randn(64, 80)[:, 5:53], torch.empty(48, 48)
    launch((2, 2), matmul, a, b, c, 32, 32, 32)
    close(c, a @ b)


@ct.kernel
def look_up(table, indices, y, columns, BLOCK: ConstInt):
    row = ct.bid(0)
    index = ct.load(indices, (row,), ())
    for tile in range(ct.cdiv(columns, BLOCK)):
        column = tile * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
        ct.scatter(y, (row, column), ct.gather(table, (index, column)))


@ct.kernel
def look_up_backward(dy, indices, dtable, columns, BLOCK: ConstInt):
    row = ct.bid(0)
    index = ct.load(indices, (row,), ())
    for tile in range(ct.cdiv(columns, BLOCK)):
        column = tile * BLOCK + ct.arange(BLOCK, dtype=ct.int32)
        ct.atomic_add(dtable, (index, column), ct.astype(ct.gather(dy, (row, column)), dtable.dtype))


@each_dtype
def test_look_up(dtype):
    table, indices = torch.randn(11, 100).to(dtype), torch.randint(0, 11, (9,))
    y = torch.empty(9, 100, dtype=dtype)
    launch(9, look_up, table, indices, y, 100, 64)
    assert torch.equal(y, table[indices])
    dy, dtable = torch.randn(9, 100).to(dtype), torch.zeros(11, 100)
    launch(9, look_up_backward, dy, indices, dtable, 100, 64)
    close(dtable, torch.zeros(11, 100).index_add_(0, indices, dy.float()))


@ct.kernel
def divergence(logp, logq, loss, beta: ct.Constant[float], columns, BLOCK: ConstInt):
    """Jensen-Shannon: of the mixture m = beta p + (1 - beta) q."""
    row = ct.bid(0)
    sums = ct.zeros((1, BLOCK), ct.float32)
    for tile in range(ct.cdiv(columns, BLOCK)):
        p = ct.astype(ct.load(logp, (row, tile), (1, BLOCK), padding_mode=NEG_INF), ct.float32)
        q = ct.astype(ct.load(logq, (row, tile), (1, BLOCK), padding_mode=NEG_INF), ct.float32)
        m = ct.log(beta * ct.exp(p) + (1.0 - beta) * ct.exp(q))
        terms = beta * ct.exp(p) * (p - m) + (1.0 - beta) * ct.exp(q) * (q - m)
        inside = ct.reshape(tile * BLOCK + ct.arange(BLOCK, dtype=ct.int32), (1, BLOCK)) < columns
        sums = sums + ct.where(inside, terms, 0.0)  # outside they are NaN
    ct.store(loss, (row,), ct.reshape(ct.sum(sums, axis=1), (1,)))


@each_dtype
def test_divergence(dtype):
    logp, logq = (torch.log_softmax(torch.randn(4, 200), 1).to(dtype) for _ in range(2))
    loss = torch.empty(4)
    launch(4, divergence, logp, logq, loss, 0.3, 200, 64)
    p, q = logp.double(), logq.double()
    m = (0.3 * p.exp() + 0.7 * q.exp()).log()
    close(loss, (0.3 * p.exp() * (p - m) + 0.7 * q.exp() * (q - m)).sum(1))


@ct.kernel
def by_turns(x: ct.IndexedWithInt64, y: ct.IndexedWithInt64, BLOCK: ConstInt):
    for i in range(ct.bid(0), ct.num_tiles(x, axis=0, shape=(BLOCK,)), ct.num_blocks(0)):
        t = ct.load(x, (i,), (BLOCK,), padding_mode=ZERO)
        if i % 2 == 0:
            t = t * 2
        elif i == 3:
            t = t - 7
        else:
            t = t // 3
        ct.store(y, (i,), t)


def test_turns_and_branches():
    x = torch.randint(-1000, 1000, (1003,))
    y = torch.empty_like(x)
    launch(3, by_turns, x, y, 64)
    i = torch.arange(1003) // 64
    expected = torch.where(i % 2 == 0, x * 2, torch.where(i == 3, x - 7, x.div(3, rounding_mode="floor")))
    assert torch.equal(y, expected)


@ct.kernel
def integer_arithmetic(x, y, results, BLOCK: ConstInt):
    a, b = ct.load(x, (0,), (BLOCK,)), ct.load(y, (0,), (BLOCK,))
    ct.store(results, (0, 0), ct.reshape(a // b, (1, BLOCK)))
    ct.store(results, (1, 0), ct.reshape(a % b, (1, BLOCK)))
    ct.store(results, (2, 0), ct.reshape((a << 3) ^ (a >> 2), (1, BLOCK)))
    ct.store(results, (3, 0), ct.reshape(ct.astype(ct.astype(a, ct.uint32) >> 28, ct.int32), (1, BLOCK)))
    ct.store(results, (4, 0), ct.reshape(ct.where(a > b, a & b, a | ~b), (1, BLOCK)))
    ct.store(results, (5, 0), ct.full((1, BLOCK), 1, ct.int32) * ct.reshape(ct.argmax(a, axis=0), (1, 1)))
    ct.store(results, (6, 0), ct.reshape(ct.astype(ct.astype(a > b, ct.float32) * 3.0, ct.int32), (1, BLOCK)))


def test_integer_arithmetic():
    """Meaning of Python's operators."""
    a = torch.randint(-(2**31), 2**31 - 1, (32,)).int()
    b = torch.randint(1, 50, (32,)).int() * torch.where(torch.arange(32) % 2 == 0, 1, -1).int()
    results = torch.empty(7, 32, dtype=torch.int32)
    launch(1, integer_arithmetic, a, b, results, 32)
    assert torch.equal(results[0], a.div(b, rounding_mode="floor"))
    assert torch.equal(results[1], a.remainder(b))
    assert torch.equal(results[2], (a << 3) ^ (a >> 2))
    assert torch.equal(results[3], ((a.long() & 0xFFFFFFFF) >> 28).int())
    assert torch.equal(results[4], torch.where(a > b, a & b, a | ~b))
    assert (results[5] == a.argmax()).all()
    assert torch.equal(results[6], (a > b).int() * 3)


@ct.kernel
def prefixes(x, y, BLOCK: ConstInt):
    t = ct.load(x, (0,), (BLOCK,))
    ct.store(y, (0, 0), ct.reshape(ct.cumsum(t, axis=0), (1, BLOCK)))
    ct.store(y, (1, 0), ct.reshape(ct.cumsum(t, axis=0, reverse=True), (1, BLOCK)))
    ct.store(y, (2, 0), ct.reshape(ct.scan(t, 0, lambda a, b: ct.maximum(a, b), -1e30), (1, BLOCK)))
    ct.store(y, (3, 0), ct.full((1, BLOCK), 0.0, ct.float32) + ct.reduce(t, 0, lambda a, b: ct.minimum(a, b), 1e30))


def test_scans_and_reductions():
    x, y = torch.rand(64) + 0.5, torch.empty(4, 64)
    launch(1, prefixes, x, y, 64)
    close(y, torch.stack([x.cumsum(0), x.flip(0).cumsum(0).flip(0), x.cummax(0).values, x.min().expand(64)]))


@ct.kernel
def collatz(x, y):
    n = ct.load(x, (ct.bid(0),), ())
    if n < 0:
        return
    steps = 0
    while n != 1:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps = steps + 1
        if steps > 1000:
            break
    ct.store(y, (ct.bid(0),), steps)


def test_while_break_return():
    x, y = torch.tensor([1, 2, 3, 27, -5], dtype=torch.int32), torch.full((5,), -1, dtype=torch.int32)
    launch(5, collatz, x, y)
    assert y.tolist() == [0, 1, 7, 111, -1]


@ct.kernel
def transpose_in_memory(x, y, SIDE: ConstInt):
    i, j = ct.bid(0), ct.bid(1)
    ct.store(y, (j, i), ct.load(x, (j, i), (SIDE, SIDE), order="F", padding_mode=ZERO))


@ct.kernel
def transpose_tile(x, y, SIDE: ConstInt):
    t = ct.load(x, (ct.bid(0), ct.bid(1)), (SIDE, SIDE), padding_mode=ZERO)
    ct.store(y, (ct.bid(1), ct.bid(0)), ct.transpose(t))


@pytest.mark.parametrize("kernel", [transpose_in_memory, transpose_tile], ids=["order", "transpose"])
def test_transposed(kernel):
    x, y = torch.randn(50, 70), torch.empty(70, 50)
    launch((4, 5), kernel, x, y, 16)
    assert torch.equal(y, x.t())


@ct.kernel
def sum_of_list(arrays, y, COUNT: ConstInt, BLOCK: ConstInt):
    sums = ct.zeros((BLOCK,), ct.float32)
    for i in range(COUNT):
        sums = sums + ct.load(arrays[i], (ct.bid(0),), (BLOCK,), padding_mode=ZERO)
    ct.store(y, (ct.bid(0),), sums)


@ct.kernel
def scaled(pair, y, BLOCK: ConstInt):
    array, scale = pair
    ct.store(y, (0,), ct.load(array, (0,), (BLOCK,)) * scale)


def test_lists_and_tuples():
    arrays, y = [torch.randn(100) for _ in range(3)], torch.empty(100)
    launch(4, sum_of_list, arrays, y, 3, 32)
    close(y, sum(arrays))
    launch(1, scaled, (arrays[0][:32], 3.0), y, 32)
    close(y[:32], arrays[0][:32] * 3)


@ct.kernel
def last_block_finishes(x, sums, arrived, BLOCK: ConstInt):
    ct.atomic_add(sums, 0, ct.sum(ct.load(x, (ct.bid(0),), (BLOCK,)), axis=0))
    if ct.atomic_add(arrived, 0, 1) == ct.num_blocks(0) - 1:
        ct.atomic_xchg(sums, 1, 7.0)


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_last_block_finishes(order):
    x, sums = torch.randn(128), torch.zeros(2)
    with tileir.checking(order=order):
        launch(4, last_block_finishes, x, sums, torch.zeros(1, dtype=torch.int32), 32)
    close(sums, torch.stack([x.sum(), torch.tensor(7.0)]))


@ct.kernel
def swap_if(x, expected, new, BLOCK: ConstInt):
    lanes = ct.arange(BLOCK, dtype=ct.int32)
    ct.atomic_cas(x, lanes, ct.load(expected, (0,), (BLOCK,)), ct.load(new, (0,), (BLOCK,)))
    ct.atomic_max(x, lanes * 0, ct.load(new, (0,), (BLOCK,)))


def test_atomics():
    """Lanes that share an element follow one another."""
    x, expected = torch.arange(16, dtype=torch.int32), torch.arange(16, dtype=torch.int32)
    expected[::2] = -1
    new = torch.arange(100, 116, dtype=torch.int32)
    launch(1, swap_if, x, expected, new, 16)
    assert x.tolist() == [115] + [100 + i if i % 2 else i for i in range(1, 16)]


@ct.kernel
def product(a, b, c, TF32: ct.Constant[bool]):
    left, right = ct.load(a, (0, 0), (16, 16)), ct.load(b, (0, 0), (16, 16))
    if TF32:
        left, right = ct.astype(left, ct.tfloat32), ct.astype(right, ct.tfloat32)
    ct.store(c, (0, 0), ct.mma(left, right, ct.zeros((16, 16), c.dtype)))


@pytest.mark.parametrize(
    ("dtype", "tf32", "error"),
    [
        (torch.float16, False, 1e-3),
        (torch.float32, False, 1e-5),
        (torch.float32, True, 2e-2),
        (torch.float8_e4m3fn, False, 1e-5),
        (torch.int8, False, 0),
    ],
)
def test_matmul_types(dtype, tf32, error):
    a, b = ((torch.randn(16, 16) * 4).to(dtype) for _ in range(2))
    c = torch.empty(16, 16, dtype=torch.int32 if dtype is torch.int8 else torch.float32)
    launch(1, product, a, b, c, tf32)
    expected = a.float().double() @ b.float().double()
    torch.testing.assert_close(c.double(), expected, rtol=error, atol=error * 16)
    assert not tf32 or (c - expected).abs().max() > 1e-6


@ct.kernel
def rows_by_index(x, indices, y, FIRST: ConstInt, COLUMNS: ConstInt, ROWS: ConstInt):
    i = ct.load(indices, (ct.bid(0),), (ROWS,), padding_mode=ZERO)
    t = ct.load_advanced_indexing(x, (i, ct.Slice(FIRST, COLUMNS)), padding_mode=ZERO)
    ct.store_advanced_indexing(y, (i, ct.Slice(FIRST, COLUMNS)), t + 1)


def test_rows_by_index():
    x, indices, y = torch.randn(10, 20), torch.randperm(10)[:8].int(), torch.zeros(10, 20)
    launch(2, rows_by_index, x, indices, y, 5, 16, 4)
    expected = torch.zeros(10, 20)
    expected[indices.long(), 5:] = x[indices.long(), 5:] + 1
    assert torch.equal(y, expected)


@ct.kernel
def sum_of_tiles(x, y, BLOCK: ConstInt):
    source, sums = x.tiled_view((BLOCK,), padding_mode=ZERO), y.tiled_view((BLOCK,))
    for i in range(ct.bid(0), source.num_tiles(0), ct.num_blocks(0)):
        sums.atomic_store_add((0,), source.load((i,)))


def test_atomic_reduction_into_a_view():
    x, y = torch.randn(100), torch.zeros(16)
    launch(3, sum_of_tiles, x, y, 16)
    close(y, F.pad(x, (0, 12)).view(7, 16).sum(0))


@ct.kernel
def sums_of_windows(x, y, WIDTH: ConstInt, STEP: ConstInt):
    """Windows overlap where a step is less than the width, and the last ones end in padding."""
    windows = x.tiled_view((WIDTH,), padding_mode=ZERO, traversal_steps=(STEP,))
    for i in range(windows.num_tiles(0)):
        ct.store(y, (i,), ct.sum(windows.load((i,)), axis=0))


@pytest.mark.parametrize(("width", "step"), [(8, 8), (8, 4), (4, 8)])
def test_windows(width, step):
    x = torch.randn(50)
    count = -(-50 // step)
    y = torch.empty(count)
    launch(1, sums_of_windows, x, y, width, step)
    close(y, F.pad(x, (0, width + step))[: (count - 1) * step + width].unfold(0, width, step).sum(1))


@ct.kernel
def halves_swapped(x, y, BLOCK: ConstInt):
    bits = ct.bitcast(ct.load(x, (0,), (BLOCK,)), ct.int32)
    ct.store(y, (0,), ct.cat((ct.extract(bits, (1,), (BLOCK // 2,)), ct.extract(bits, (0,), (BLOCK // 2,))), 0))


def test_bits_and_parts():
    x, y = torch.randn(32), torch.empty(32, dtype=torch.int32)
    launch(1, halves_swapped, x, y, 32)
    assert torch.equal(y, x.view(torch.int32).roll(16))


@ct.kernel
def as_scalars(x, y):
    """A tile of one element as a scalar, outside of a reduction's body, where such shapes are left out."""
    t = ct.load(x, (ct.bid(0), 0), (1, 1))
    ct.scatter(y, ct.bid(0), ct.reshape(t, ()))
    ct.atomic_add(y, 3, t.item())


def test_scalars():
    x, y = torch.arange(3.0).reshape(3, 1), torch.zeros(4)
    launch(3, as_scalars, x, y)
    assert y.tolist() == [0, 1, 2, 3]


@ct.kernel
def tells(x):
    ct.grid_dependency_control_wait()
    ct.print("largest", ct.max(ct.load(x, (ct.bid(0),), (4,)), axis=0))
    ct.grid_dependency_control_launch_dependents()


def test_print(capsys):
    launch(2, tells, torch.arange(8.0))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("block (0, 0, 0): 'largest")
    assert second.startswith("block (1, 0, 0)")
    assert second.endswith(" 7.0")


@ct.kernel
def rounded(x, y, MODE: ConstInt, BLOCK: ConstInt):
    t = ct.load(x, (0,), (BLOCK,))
    if MODE == 0:
        t = ct.add(t, 1.0, rounding_mode=ct.RoundingMode.RZ)
    elif MODE == 1:
        t = ct.add(t, 1.0, rounding_mode=ct.RoundingMode.RM)
    elif MODE == 2:
        t = ct.add(t, 1.0, rounding_mode=ct.RoundingMode.RP)
    else:
        t = ct.mul(t, 1e-40, flush_to_zero=True)
    ct.store(y, (0,), t)


def test_rounding_modes():
    """The front end's names for them."""
    x = torch.randn(64) * 1e-3
    exact, results = x.double() + 1, []
    for mode in range(4):
        y = torch.empty(64)
        launch(1, rounded, x, y, mode, 64)
        results.append(y)
    zero, down, up, flushed = results
    assert (zero.double() <= exact).all()
    assert (down.double() <= exact).all()
    assert (up.double() >= exact).all()
    assert torch.equal(zero, down)
    assert not torch.equal(down, up)
    assert (flushed == 0).all()


def test_launches_share_what_is_compiled(monkeypatch, tmp_path):
    """A kernel is decoded once per signature, which doesn't say by what its sizes and addresses can be divided."""
    from liger_conformance.interpreters.tileir import capture

    monkeypatch.setattr(capture, "CACHE", tmp_path)
    monkeypatch.setattr(capture, "_programs", {})
    compiled = []
    monkeypatch.setattr(
        capture, "bytecode", lambda *arguments, of=capture.bytecode: (compiled.append(1), of(*arguments))[1]
    )
    for rows in (5, 6, 7):
        x = torch.randn(rows, 24)
        launch(rows, softmax, x, torch.empty_like(x), 8)
        x = torch.randn(rows, 33)[:, 1:]
        launch(rows, softmax, x, torch.empty_like(x), 8)
    assert len(compiled) == 1


def test_bytecode_is_kept_for_other_processes(monkeypatch, tmp_path):
    """By all that decides it: another kernel or signature is made, and the same one is read."""
    from liger_conformance.interpreters.tileir import capture

    monkeypatch.setattr(capture, "CACHE", tmp_path)
    x = torch.randn(5, 24)
    results = []
    for columns in (24, 24, 16):
        monkeypatch.setattr(capture, "_programs", {})
        if results:
            monkeypatch.setattr(capture, "bytecode", lambda *arguments: pytest.fail("made again"))
        rows = x[:, :columns]
        results.append(torch.empty(5, columns))
        launch(5, softmax, rows, results[-1], 8)
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(results[0], results[1])
    with pytest.raises(pytest.fail.Exception, match="made again"):
        launch(5, softmax, x.bfloat16(), torch.empty(5, 24, dtype=torch.bfloat16), 8)
