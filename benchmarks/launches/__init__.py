"""A kernel that hardly computes, in each language: its time is the launch's cost.

Each module's ``launches(device)`` gives two calls of nine arguments, four tensors, three numbers and two constants: by the
function that launches the package's kernels, and by the language's own.
"""
