"""The kernels: one file per op, named after it. There is no other registration."""
