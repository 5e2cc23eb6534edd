"""The kernels: one file per op, named after it. Files that start with an underscore are shared by several ops."""
