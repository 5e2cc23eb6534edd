"""Mutation testing: random wrong kernels, made of a package's own files, and which of them the suite kills.

Two families. *Changes* of one place of a file, in `changes`: an operator, a mask, a stride, a term, a constant, a condition, an
argument of a launch. *Faults*, in `faults`, wrap `forward` and `backward` of an op, in any language: a wrong value under a
condition, and wrong behaviour beside values, such as a buffer that two calls share.
"""
