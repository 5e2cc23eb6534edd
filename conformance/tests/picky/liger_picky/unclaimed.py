"""What the kernels refuse that their ops' first cases ask for."""

UNCLAIMED = {"swiglu-odd-*": "rows are multiples of 16 alone"}
