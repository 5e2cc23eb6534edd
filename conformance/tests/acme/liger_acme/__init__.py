"""A package that somebody else ships: one language, one kernel, no line changed anywhere else."""

from liger_core import BackendInfo

backend = BackendInfo(
    "acme", devices=("cpu", "cuda"), requires="triton", package="liger_acme", install="pip install liger-acme"
)
