"""A language whose kernels do nothing: what a call then costs is the cost of liger_core and of autograd."""

from liger_core import BackendInfo


def on(device: str) -> BackendInfo:
    """The language, as the default one of `device`."""
    return BackendInfo(
        "noop",
        (device,),
        requires="torch",
        package="noop_language",
        install="part of benchmarks/",
        default_devices=(device,),
    )
