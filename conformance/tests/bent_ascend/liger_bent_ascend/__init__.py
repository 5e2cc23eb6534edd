"""A language whose kernels Ascend's compiler would take in part: each has something else wrong with it, by its op's name."""

from liger_core import BackendInfo

backend = BackendInfo(
    "bent-ascend",
    devices=("npu",),
    requires="triton",
    package="liger_bent_ascend",
    install="pip install liger-bent-ascend",
)
