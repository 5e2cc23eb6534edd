"""Kernels of the language bent."""
