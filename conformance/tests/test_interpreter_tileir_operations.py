"""Each operation of Tile IR alone, against Python's integers and fractions, and numpy. No kernel, no cuda.tile."""

from __future__ import annotations

import math
import operator
import random
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from liger_conformance.interpreters.tileir import control, floats, integers
from liger_conformance.interpreters.tileir.bytecode import Op, Type
from liger_conformance.interpreters.tileir.checks import KernelBug
from liger_conformance.interpreters.tileir.memory import DTYPES, Array, Pointer, View

WIDTHS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}
FLOATS = ("f64", "f32", "bf16", "f16")
NARROW = {"f32": 24, "bf16": 8, "f16": 11}  # significant bits
COUNT = 200

each_width = pytest.mark.parametrize("element", WIDTHS)
each_sign = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def run(name, element, *operands, shape=None, **attributes):
    """The result of an operation on tensors."""
    shape = tuple(operands[0].shape) if shape is None else shape
    op = Op(name, results=[0], types=[Type("tile", element, shape)], attributes=attributes, location="here")
    return control.PURE[name](op)(*operands)


def some_integers(bits, seed, zero=True):
    """Edges and random numbers of all magnitudes, as signed ones."""
    draw = random.Random(seed)
    edges = [0, 1, 2, 3, -1, -2, -(1 << bits - 1), (1 << bits - 1) - 1, (1 << bits - 2)]

    def one():
        if draw.random() < 0.4:
            return draw.choice(edges)
        return draw.randrange(-(1 << bits - 1), 1 << bits - 1) >> draw.randrange(bits)

    values = [one() for _ in range(COUNT)]
    return values if zero else [value or 1 for value in values]


def tile(values, element):
    return torch.tensor(values, dtype=DTYPES[element])


def wrapped(value, bits):
    """The signed number of the same bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def taken(value, bits, signed):
    """The number that an operation takes the bits for."""
    return value if signed else value & (1 << bits) - 1


def truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "addi": operator.add,
    "subi": operator.sub,
    "muli": operator.mul,
    "andi": operator.and_,
    "ori": operator.or_,
    "xori": operator.xor,
    "maxi": max,
    "mini": min,
}


@each_width
@each_sign
@pytest.mark.parametrize("name", BINARY)
def test_integers(name, signed, element):
    bits = WIDTHS[element]
    a, b = some_integers(bits, 1), some_integers(bits, 2)
    expected = [
        wrapped(BINARY[name](taken(x, bits, signed), taken(y, bits, signed)), bits) for x, y in zip(a, b, strict=True)
    ]
    assert run(name, element, tile(a, element), tile(b, element), signed=signed).tolist() == expected


@each_width
def test_high_half_of_a_product(element):
    bits = WIDTHS[element]
    a, b = some_integers(bits, 1), some_integers(bits, 2)
    expected = [wrapped(taken(x, bits, False) * taken(y, bits, False) >> bits, bits) for x, y in zip(a, b, strict=True)]
    assert run("mulhi", element, tile(a, element), tile(b, element)).tolist() == expected


@each_width
def test_negation_and_absolute_value(element):
    a = some_integers(WIDTHS[element], 1)
    assert run("negi", element, tile(a, element)).tolist() == [wrapped(-x, WIDTHS[element]) for x in a]
    assert run("absi", element, tile(a, element)).tolist() == [wrapped(abs(x), WIDTHS[element]) for x in a]


@each_width
@each_sign
@pytest.mark.parametrize(
    ("rounding", "function"),
    [
        (integers.TOWARDS_ZERO, truncated),
        (integers.DOWN, operator.floordiv),
        (integers.UP, lambda a, b: -(-a // b)),
    ],
)
def test_division(rounding, function, signed, element):
    bits = WIDTHS[element]
    pairs = zip(some_integers(bits, 3), some_integers(bits, 4, zero=False), strict=True)
    # Quotients that overflow have no meaning.
    a, b = zip(*((x, y) for x, y in pairs if not (x == -(1 << bits - 1) and y == -1)), strict=True)
    quotients = [
        wrapped(function(taken(x, bits, signed), taken(y, bits, signed)), bits) for x, y in zip(a, b, strict=True)
    ]
    actual = run("divi", element, tile(a, element), tile(b, element), signed=signed, rounding=rounding)
    assert actual.tolist() == quotients


@each_width
@each_sign
def test_remainder(signed, element):
    bits = WIDTHS[element]
    pairs = zip(some_integers(bits, 3), some_integers(bits, 4, zero=False), strict=True)
    a, b = zip(*((x, y) for x, y in pairs if not (x == -(1 << bits - 1) and y == -1)), strict=True)
    numbers = [(taken(x, bits, signed), taken(y, bits, signed)) for x, y in zip(a, b, strict=True)]
    actual = run("remi", element, tile(a, element), tile(b, element), signed=signed)
    assert actual.tolist() == [wrapped(x - y * truncated(x, y), bits) for x, y in numbers]


@pytest.mark.parametrize("name", ["divi", "remi"])
def test_division_by_zero(name):
    with pytest.raises(KernelBug, match="arithmetic: an integer is divided by zero at here"):
        run(name, "i32", tile([1, 2], "i32"), tile([1, 0], "i32"), signed=True, rounding=integers.DOWN)


@each_width
@each_sign
def test_shifts(signed, element):
    bits = WIDTHS[element]
    a, distances = some_integers(bits, 5), [abs(x) % bits for x in some_integers(bits, 6)]
    left = run("shli", element, tile(a, element), tile(distances, element))
    assert left.tolist() == [wrapped(x << d, bits) for x, d in zip(a, distances, strict=True)]
    right = run("shri", element, tile(a, element), tile(distances, element), signed=signed)
    assert right.tolist() == [wrapped(taken(x, bits, signed) >> d, bits) for x, d in zip(a, distances, strict=True)]


@pytest.mark.parametrize("distance", [32, -1])
@pytest.mark.parametrize("name", ["shli", "shri"])
def test_shift_beyond_the_width(name, distance):
    with pytest.raises(KernelBug, match="arithmetic: a shift by 32 or more at here"):
        run(name, "i32", tile([1], "i32"), tile([distance], "i32"), signed=True)


@each_width
@each_sign
def test_comparisons_of_integers(signed, element):
    bits = WIDTHS[element]
    a, b = some_integers(bits, 5), some_integers(bits, 6)
    pairs = [(taken(x, bits, signed), taken(y, bits, signed)) for x, y in zip(a, b, strict=True)]
    functions = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
    for predicate, function in enumerate(functions):
        actual = run("cmpi", "i1", tile(a, element), tile(b, element), pred=predicate, signed=signed)
        assert actual.tolist() == [function(x, y) for x, y in pairs]


@each_width
@each_sign
def test_widths(signed, element):
    bits = WIDTHS[element]
    a = some_integers(bits, 5)
    for other, width in WIDTHS.items():
        if width > bits:
            extended = run("exti", other, tile(a, element), signed=signed)
            assert extended.tolist() == [wrapped(taken(x, bits, signed), width) for x in a]
        if width < bits:
            assert run("trunci", other, tile(a, element)).tolist() == [wrapped(x, width) for x in a]
    assert run("trunci", "i1", tile(a, element)).tolist() == [bool(x & 1) for x in a]


@each_sign
def test_one_bit(signed):
    """As a number a true bit is 1, or -1 where its only bit is taken for a sign."""
    bits = torch.tensor([False, True])
    assert run("exti", "i32", bits, signed=signed).tolist() == [0, -1 if signed else 1]
    assert run("itof", "f32", bits, signed=signed).tolist() == [0.0, -1.0 if signed else 1.0]


@each_width
@each_sign
def test_integers_to_floats(signed, element):
    """Rounded once, to nearest even."""
    bits = WIDTHS[element]
    a = some_integers(bits, 5)
    exact = [taken(x, bits, signed) for x in a]
    assert run("itof", "f64", tile(a, element), signed=signed).tolist() == [float(x) for x in exact]
    if bits < 64:
        for other in ("f32", "bf16", "f16"):
            expected = torch.tensor(exact, dtype=torch.float64).to(DTYPES[other])
            assert torch.equal(run("itof", other, tile(a, element), signed=signed), expected)


@each_width
@each_sign
def test_floats_to_integers(signed, element):
    """Towards zero, to the nearest integer that there is; NaN to zero."""
    bits = WIDTHS[element]
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    draw = random.Random(0)
    values = [draw.gauss(0, 1) * 10 ** (i / 10) for i in range(COUNT)]
    values += [math.inf, -math.inf, math.nan, -0.5, 0.5, float(most), float(least), 2.0**63, 2.0**64]
    expected = [0 if math.isnan(x) else most if x > most else least if x < least else int(x) for x in values]
    actual = run("ftoi", element, torch.tensor(values, dtype=torch.float64), signed=signed)
    assert actual.tolist() == [wrapped(x, bits) for x in expected]


def some_floats(element, seed, positive=False):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-6, 6, (COUNT,), generator=generator)
    values = torch.randn(COUNT, generator=generator, dtype=torch.float64) * 2.0**exponents
    return (values.abs() + 0.1 if positive else values).to(DTYPES[element])


def neighbours(value, element):
    """The numbers of an element type beside one of them."""
    x = torch.tensor(value, dtype=DTYPES[element])
    return [floats._neighbour(x, upwards).item() for upwards in (False, True)]


ARITHMETIC = {"addf": operator.add, "subf": operator.sub, "mulf": operator.mul, "divf": operator.truediv}


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_rounds_once(name, element):
    """No number of the type is closer to the exact result."""
    a, b = some_floats(element, 1), some_floats(element, 2, positive=True)
    actual = run(name, element, a, b, rounding=floats.NEAREST_EVEN, ftz=False)
    for x, y, z in zip(a.tolist(), b.tolist(), actual.tolist(), strict=True):
        exact = ARITHMETIC[name](Fraction(x), Fraction(y))
        assert all(abs(Fraction(z) - exact) <= abs(Fraction(n) - exact) for n in neighbours(z, element) if n != 0)


@pytest.mark.parametrize("element", NARROW)
def test_multiply_add_rounds_once(element):
    a, b, c = (some_floats(element, seed) for seed in (1, 2, 3))
    actual = run("fma", element, a, b, c, rounding=floats.NEAREST_EVEN, ftz=False)
    for x, y, z, w in zip(a.tolist(), b.tolist(), c.tolist(), actual.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        assert all(abs(Fraction(w) - exact) <= abs(Fraction(n) - exact) for n in neighbours(w, element))


DIRECTIONS = {
    floats.TOWARDS_ZERO: lambda rounded, exact: rounded.abs() <= exact.abs(),
    floats.DOWN: lambda rounded, exact: rounded <= exact,
    floats.UP: lambda rounded, exact: rounded >= exact,
}


@pytest.mark.parametrize("element", NARROW)
@pytest.mark.parametrize("rounding", DIRECTIONS)
def test_directed_conversion(rounding, element):
    """On the right side of the exact number, and less than a step from it."""
    x = some_floats("f64", 1)
    rounded = run("ftof", element, x, rounding=rounding).double()
    assert DIRECTIONS[rounding](rounded, x).all()
    assert ((rounded - x).abs() < x.abs() * 2.0 ** (1 - NARROW[element])).all()
    assert not torch.equal(rounded, x)


@pytest.mark.parametrize("rounding", DIRECTIONS)
def test_directed_sum(rounding):
    x = some_floats("f32", 1) * 1e-3
    exact = x.double() + 1
    rounded = run("addf", "f32", x, torch.ones_like(x), rounding=rounding, ftz=False).double()
    assert DIRECTIONS[rounding](rounded, exact).all()
    assert ((rounded - exact).abs() < 2.0**-22).all()


def test_rounding_that_is_unknown():
    with pytest.raises(NotImplementedError, match="addf at here: rounding 7"):
        run("addf", "f32", torch.ones(1), torch.ones(1), rounding=7, ftz=False)


def test_tf32_has_ten_bits():
    x = torch.cat([some_floats("f32", 1), torch.tensor([math.inf, -math.inf, math.nan])])
    rounded = run("ftof", "tf32", x, rounding=floats.NEAREST_EVEN)
    finite = x.isfinite()
    assert (rounded[finite].view(torch.int32) & 0x1FFF == 0).all()
    assert ((rounded - x)[finite].abs() <= x[finite].abs() * 2.0**-11).all()
    assert rounded[~finite].tolist()[:2] == [math.inf, -math.inf]
    assert rounded[-1].isnan()


def test_subnormal_numbers_are_flushed():
    x = torch.tensor([1e-40, -1e-40, 1.0])
    flushed = run("mulf", "f32", x, torch.ones(3), rounding=floats.NEAREST_EVEN, ftz=True)
    assert flushed.tolist() == [0.0, 0.0, 1.0]
    assert flushed.signbit().tolist() == [False, True, False]
    assert run("mulf", "f32", x, torch.ones(3), rounding=floats.NEAREST_EVEN, ftz=False)[0] > 0
    assert run("rsqrt", "f32", x.abs(), ftz=True).tolist() == [math.inf, math.inf, 1.0]


UNARY = {
    "absf": np.abs, "negf": np.negative, "ceil": np.ceil, "floor": np.floor, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh, "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
}  # fmt: skip


@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_functions(name, element):
    x = some_floats(element, 1, positive=True)
    actual = run(name, element, x, rounding=floats.APPROXIMATE, ftz=False)
    assert actual.dtype is DTYPES[element]
    expected = torch.from_numpy(UNARY[name](x.double().numpy())).to(x.dtype)
    torch.testing.assert_close(actual, expected, rtol=4 * torch.finfo(DTYPES[element]).eps, atol=1e-6)


def test_powers():
    x = some_floats("f32", 1, positive=True)
    torch.testing.assert_close(run("powf", "f32", x, torch.full_like(x, 2.5)), x.double().pow(2.5).float())
    torch.testing.assert_close(run("powi", "f32", -x, torch.full((COUNT,), 3, dtype=torch.int32)), -(x * x * x))


def test_remainder_has_the_dividend_s_sign():
    a, b = torch.tensor([5.5, -5.5, 5.5]), torch.tensor([2.0, 2.0, -2.0])
    assert run("remf", "f32", a, b).tolist() == [math.fmod(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


def test_angle():
    y, x = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([-1.0, -1.0, -1.0])
    torch.testing.assert_close(run("atan2", "f32", y, x), torch.tensor([0.75, -0.75, 1.0]) * math.pi)


def test_comparisons_with_nan():
    a, b = torch.tensor([math.nan, 1.0, 1.0]), torch.tensor([1.0, 1.0, 2.0])
    expected = {
        (0, True): [False, True, False],
        (0, False): [True, True, False],
        (1, True): [False, False, True],
        (1, False): [True, False, True],
        (2, True): [False, False, True],
        (2, False): [True, False, True],
        (5, True): [False, True, False],
        (5, False): [True, True, False],
    }
    for (predicate, ordered), values in expected.items():
        assert run("cmpf", "i1", a, b, pred=predicate, ordered=ordered).tolist() == values


@pytest.mark.parametrize(("name", "result"), [("maxf", 2.0), ("minf", 1.0)])
def test_nan_in_maxima_and_minima(name, result):
    a, b = torch.tensor([math.nan, 1.0, 1.0]), torch.tensor([2.0, math.nan, 2.0])
    assert run(name, "f32", a, b, nan=False, ftz=False).tolist() == [2.0, 1.0, result]
    passed_on = run(name, "f32", a, b, nan=True, ftz=False)
    assert passed_on.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("element", "value", "data"),
    [
        ("f32", 1.5, struct.pack("<f", 1.5)),
        ("i1", True, b"\xff"),
        ("i8", -3, b"\xfd"),
        ("i64", -(1 << 40), struct.pack("<q", -(1 << 40))),
        ("bf16", 1.0, b"\x80\x3f"),
        ("tf32", 1.0, (0x3F800000 >> 13).to_bytes(3, "little")),
    ],
)
def test_constants(element, value, data):
    """Constants have one number for a whole tile, or each element has its own."""
    assert run("constant", element, shape=(4,), value=data).tolist() == [value] * 4
    if element != "i1":
        assert run("constant", element, shape=(2,), value=data * 2).tolist() == [value] * 2


def test_constant_bits():
    assert run("constant", "i1", shape=(8,), value=b"\x05").tolist() == [True, False, True] + [False] * 5


def test_shapes():
    x = torch.arange(16, dtype=torch.int32).reshape(2, 8)
    assert run("iota", "i32", shape=(4,)).tolist() == [0, 1, 2, 3]
    assert torch.equal(run("reshape", "i32", x, shape=(4, 4)), x.view(4, 4))
    assert torch.equal(run("broadcast", "i32", x[:1], shape=(2, 8)), x[:1].expand(2, 8))
    assert torch.equal(run("permute", "i32", x, shape=(8, 2), perm=(1, 0)), x.t())
    assert torch.equal(run("cat", "i32", x, x + 1, shape=(2, 16), dim=1), torch.cat([x, x + 1], 1))


def test_parts():
    """An index counts parts, not elements."""
    x, one, zero = torch.arange(16, dtype=torch.int32).reshape(2, 8), torch.tensor(1), torch.tensor(0)
    part = run("extract", "i32", x, one, one, shape=(1, 4))
    assert part.tolist() == [[12, 13, 14, 15]]
    whole = run("insert", "i32", part, x, zero, one, shape=(2, 8))
    assert whole[0].tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert x[0, 4] == 4  # what was inserted into is another value


def test_bits():
    x = some_floats("f32", 1)
    assert torch.equal(run("bitcast", "i32", x), x.view(torch.int32))
    assert torch.equal(run("pack", "i8", x), x.view(torch.int8))
    assert torch.equal(run("unpack", "f32", x.view(torch.int8)), x)


def test_addresses():
    x = torch.zeros(3, 4, dtype=torch.int16)
    pointer = Pointer(Array(x, "x", {}), torch.tensor([0, 5]))
    assert run("ptr_to_int", "i64", pointer, shape=(2,)).tolist() == [x.data_ptr(), x[1, 1:].data_ptr()]
    moved = run("offset", "i64", pointer, torch.tensor([1, -1]), shape=(2,))
    assert moved.numbers.tolist() == [1, 4]


def test_sizes_of_a_view():
    view = View(Array(torch.zeros(3, 4), "x", {}), 0, [3, 4], [4, 1])
    op = Op("get_tensor_shape", types=[Type("tile", "i32"), Type("tile", "i32")])
    assert [size.item() for size in control.PURE["get_tensor_shape"](op)(view)] == [3, 4]


def test_selection():
    actual = run("select", "i32", torch.tensor([True, False]), tile([1, 2], "i32"), tile([3, 4], "i32"))
    assert actual.tolist() == [1, 4]


@pytest.mark.parametrize(
    ("element", "accumulator"), [("f16", "f16"), ("bf16", "f32"), ("f8e4m3fn", "f32"), ("f64", "f64")]
)
def test_matmul(element, accumulator):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(DTYPES[element]) for _ in range(2))
    c = torch.randn(16, 16, generator=generator).to(DTYPES[accumulator])
    actual = run("mmaf", accumulator, a, b, c, shape=(16, 16), fast=False)
    wide = torch.float32 if element.startswith("f8") else torch.float64  # there is no float8 to float64
    expected = a.to(wide).double() @ b.to(wide).double() + c.double()
    torch.testing.assert_close(
        actual, expected.to(DTYPES[accumulator]), rtol=1e-3 if element == "f16" else 1e-5, atol=1e-3
    )


@pytest.mark.parametrize("signed_a", [True, False])
@pytest.mark.parametrize("signed_b", [True, False])
def test_integer_matmul(signed_a, signed_b):
    a, b = (tile(some_integers(8, seed)[:64], "i8").view(8, 8) for seed in (1, 2))
    c = torch.ones(8, 8, dtype=torch.int32)
    actual = run("mmai", "i32", a, b, c, signed_a=signed_a, signed_b=signed_b)
    x, y = (t.long() if s else t.long() & 255 for t, s in ((a, signed_a), (b, signed_b)))
    assert torch.equal(actual, (x @ y + 1).int())


def test_scaled_matmul():
    """A scale for each block of 4 along the sum."""
    a, b = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8, 2, dtype=torch.bfloat16)
    scale_a = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    scale_b = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    actual = run("mmaf_scaled", "f32", a, b, torch.zeros(2, 2), scale_a, scale_b)
    assert torch.equal(actual, 4 * scale_a @ scale_b)
