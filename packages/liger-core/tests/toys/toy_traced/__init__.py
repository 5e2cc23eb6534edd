"""A language whose kernels torch.compile can trace: they are PyTorch code, derived by hand."""

from liger_core import BackendInfo

backend = BackendInfo(
    "toy-traced",
    ("cpu",),
    requires="torch",
    package="toy_traced",
    install="pip install toy-traced",
    default_devices=("cpu",),
)
