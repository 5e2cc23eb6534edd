"""Kernels that do nothing."""
