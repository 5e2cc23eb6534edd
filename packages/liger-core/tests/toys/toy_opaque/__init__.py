"""A language whose launches torch.compile can't trace: they go through NumPy."""

from liger_core import BackendInfo

backend = BackendInfo("toy-opaque", ("cpu",), requires="torch", package="toy_opaque", install="pip install toy-opaque")
