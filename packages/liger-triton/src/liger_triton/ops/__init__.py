"""The kernels: one file per op, of the op's name. A file that starts with an underscore is shared by several."""
