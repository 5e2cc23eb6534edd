"""Wrong kernels that the suite lets through, with the reason: see docs/mutants.md. Declarations are strict."""

KNOWN_MUTANTS = {
    (
        "rope rope.rotate_heads: loop: range(TILES) -> range(0, (0) + 1)"
    ): "the heads of all cases fit one tile: tests/test_kernels.py has 300",
    (
        "softmax softmax._launch_backward: condition fixed: columns > LONGEST_BACKWARD -> True"
    ): "rows in parts, which is right for short rows as well",
}
