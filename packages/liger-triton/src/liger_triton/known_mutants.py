"""Wrong kernels that the suite lets through, with the reason: see docs/mutants.md. Declarations are strict."""

_PROMOTED = "the other operand has the wider dtype, so the result does"
_ROUNDED = "one operand more is rounded to 16 bits, as PyTorch rounds it: the rule allows that"
_NOT_STORED = "elements outside the row are not stored"
_TILES = "stages, columns of a tile or where a scale is loaded: it changes speed alone"

KNOWN_MUTANTS = {
    (
        "dyt dyt._forward: cast dropped: tl.load(gamma + column, column < columns, other=0.0).to(tl.float32) "
        "-> (tl.load(gamma + column, column < columns, other=0.0))"
    ): _PROMOTED,
    "dyt dyt.forward: bound: rows * columns <= FEW -> ((rows * columns) < (FEW))": _TILES,
    (
        "embedding embedding._find_runs: cast dropped: tl.load(keys + further - 1, further <= rows, "
        "other=0).to(tl.int64) -> (tl.load(keys + further - 1, further <= rows, other=0))"
    ): _PROMOTED,
    (
        "geglu geglu._backward: padding: tl.load(up + (row * up_stride + first) + column, inside, other=0.0) "
        "-> tl.load(up + (row * up_stride + first) + column, inside, other=1.0)"
    ): _NOT_STORED,
    (
        "geglu geglu._forward: cast dropped: tl.load(up + (row * up_stride + first) + column, inside, "
        "other=0.0).to(tl.float32) -> (tl.load(up + (row * up_stride + first) + column, inside, other=0.0))"
    ): _PROMOTED,
    (
        "geglu geglu._forward: padding: tl.load(up + (row * up_stride + first) + column, inside, other=0.0) "
        "-> tl.load(up + (row * up_stride + first) + column, inside, other=1.0)"
    ): _NOT_STORED,
    "geglu geglu.gelu: bound: xs > 0.0 -> ((xs) >= (0.0))": "both values are 0.5 at 0",
    (
        "kl_div _divergences._total: loop: range(0, size, BLOCK) -> range(0, (0) + 1, BLOCK)"
    ): "more sums than an interpreter has programs: tests/test_kernels.py adds up 2**20",
    (
        "layer_norm layer_norm.backward: condition fixed: 3 * 2 * tile * x.element_size() < "
        "shared_memory(x.device) -> False"
    ): _TILES,
    (
        "layer_norm layer_norm.backward: condition negated: in_vectors(columns, dy_stride, x_stride) -> (not "
        "(in_vectors(columns, dy_stride, x_stride)))"
    ): _TILES,
    (
        "relu_squared relu_squared._backward: cast dropped: tl.load(up + (row * up_stride + first) + column, "
        "inside, other=0.0).to(tl.float32) -> (tl.load(up + (row * up_stride + first) + column, inside, "
        "other=0.0))"
    ): _ROUNDED,
    (
        "relu_squared relu_squared._backward: padding: tl.load(x + (row * x_stride + first) + column, inside, "
        "other=0.0) -> tl.load(x + (row * x_stride + first) + column, inside, other=1.0)"
    ): _NOT_STORED,
    "relu_squared relu_squared._forward: bound: xs <= 0.0 -> ((xs) < (0.0))": "the square of 0 is 0",
    (
        "relu_squared relu_squared._forward: cast dropped: tl.load(x + (row * x_stride + first) + column, "
        "inside, other=0.0).to(tl.float32) -> (tl.load(x + (row * x_stride + first) + column, inside, "
        "other=0.0))"
    ): _ROUNDED,
    (
        "relu_squared relu_squared.forward: condition fixed: x.is_contiguous() and (up is None or "
        "up.is_contiguous()) -> False"
    ): "rows one by one instead of one long row",
    "rms_norm rms_norm._backward: constant: 1 -> 2": _TILES,
    (
        "rms_norm rms_norm._forward_long: padding: tl.load(weight + column, inside, other=0.0) -> "
        "tl.load(weight + column, inside, other=1.0)"
    ): _NOT_STORED,
    "rms_norm rms_norm.launch_backward: condition fixed: dh is not None -> False (2)": _TILES,
    "rope _heads._rotate: constant: 0 -> 1 (6)": "REST is 0 or at least 16",
    (
        "softmax softmax._backward_packed: padding: tl.load(dy + row * dy_stride + column, inside, other=0.0) "
        "-> tl.load(dy + row * dy_stride + column, inside, other=1.0)"
    ): "dy is multiplied by y, which is 0 there",
    (
        "swiglu swiglu._backward: cast dropped: tl.load(dy + (row * dy_stride + first) + column, inside, "
        "other=0.0).to(tl.float32) -> (tl.load(dy + (row * dy_stride + first) + column, inside, other=0.0))"
    ): _ROUNDED,
    (
        "swiglu swiglu._forward: cast dropped: tl.load(up + (row * up_stride + first) + column, inside, "
        "other=0.0).to(tl.float32) -> (tl.load(up + (row * up_stride + first) + column, inside, other=0.0))"
    ): _PROMOTED,
}
