"""Calls in ops' first cases that the kernels refuse."""

UNCLAIMED = {"swiglu-odd-*": "rows are multiples of 16 alone"}
