"""A language whose kernel refuses most of the cases, the first among them; written in PyTorch, so that it is traced as it is."""

from liger_core import BackendInfo

backend = BackendInfo("picky", devices=("cpu", "cuda"), requires="torch", package="liger_picky", install="")
