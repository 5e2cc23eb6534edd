"""Kernels of the language picky."""
