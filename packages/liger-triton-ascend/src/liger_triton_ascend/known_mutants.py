"""Wrong kernels that the suite lets through, with the reason: see docs/mutants.md. Declarations are strict."""

KNOWN_MUTANTS = {
    "rope rope.launch: constant: 2 -> 3 (2)": "columns by which tiles are chosen: a loop takes the others",
    (
        "softmax softmax._forward_long: cast dropped: tl.load(x_row + start + lane, inside, "
        "other=float(\"-inf\")).to(tl.float32) -> (tl.load(x_row + start + lane, inside, other=float('-inf')))"
    ): "the maximum that is subtracted is float32",
    (
        "softmax softmax.backward: grid: (programs,) -> (max(1, (programs) - 1),) (2)"
    ): "programs take tiles in turn: one fewer takes longer",
}
