"""Kernels of the toy language."""
