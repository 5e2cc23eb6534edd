"""Kernels of the language acme."""
