"""A language whose kernels compile in part: each has something else wrong with it, by the name of its op."""

from liger_core import BackendInfo

backend = BackendInfo(
    "bent", devices=("cuda",), requires="triton", package="liger_bent", install="pip install liger-bent"
)
