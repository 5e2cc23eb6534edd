"""What a kernel package declares about itself, and how the installed ones are found."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

LOAD_ERRORS = (ImportError, AttributeError, TypeError, ValueError, OSError, RuntimeError)
"""What a module that can't be loaded raises."""


class Unsupported(NotImplementedError):
    """The language that was asked for can't take this call. The message says why, and what to do."""


@dataclass(frozen=True)
class BackendInfo:
    """One kernel language: where it runs and which package holds its kernels.

    A package points to its instance with an entry point of the group ``liger.backends``. A file
    ``<package>/ops/<op>.py`` is the declaration that the language implements that op; there is no other registration.

    Args:
        language: name of the kernel language, such as ``"triton"``.
        devices: torch device types that the kernels run on, such as ``("cuda", "xpu")``.
        default_devices: those of `devices` where the language is chosen without being asked for.
        requires: top-level module that the kernels import, such as ``"triton"``. It is looked for, not imported.
        package: import name of the package that holds ``ops/``.
        install: the command that installs the language, shown when `requires` is missing.
        refuses: called with a device type at the first dispatch to it; says why this machine can't run the kernels
            (an old driver, a missing compiler) and how to mend it, or returns None.

    Raises:
        ValueError: the declaration contradicts itself.
    """

    language: str
    devices: tuple[str, ...]
    requires: str
    package: str
    install: str
    default_devices: tuple[str, ...] = ()
    refuses: Callable[[str], str | None] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", self.language) or self.language == "torch":
            raise ValueError(
                f"BackendInfo: language is {self.language!r}; it takes lower-case words joined by '-', not 'torch'"
            )
        for field in ("devices", "default_devices"):
            value = getattr(self, field)
            if not isinstance(value, tuple) or not all(isinstance(d, str) and d.isidentifier() for d in value):
                raise ValueError(f"BackendInfo: {field} is {value!r}; it takes a tuple of torch device types")
        if not self.devices:
            raise ValueError("BackendInfo: devices is empty; a language runs somewhere")
        if extra := set(self.default_devices) - set(self.devices):
            raise ValueError(f"BackendInfo: default_devices has {sorted(extra)}, which devices {self.devices} lacks")
        if not all(part.isidentifier() for part in self.package.split(".")):
            raise ValueError(f"BackendInfo: package is {self.package!r}; it takes an importable name")
        if not self.requires.isidentifier():
            raise ValueError(f"BackendInfo: requires is {self.requires!r}; it takes a top-level module's name")

    def missing(self, device: str) -> str | None:
        """Why no kernel of this language can run on `device` here, or None."""
        if device not in self.devices:
            return f"{self.language} runs on {', '.join(self.devices)}, not on {device}"
        if find_spec(self.requires) is None:
            return f"{self.requires} is not installed: {self.install}"
        return self.refuses(device) if self.refuses else None

    def has_kernel(self, op: str) -> bool:
        """Whether the package has a file for `op`. Imports the package's ``ops/__init__.py``, no kernel."""
        ops = f"{self.package}.ops"
        return find_spec(ops) is not None and find_spec(f"{ops}.{op}") is not None

    def kernel(self, op: str) -> ModuleType:
        """The module that implements `op`, imported."""
        return importlib.import_module(f"{self.package}.ops.{op}")


@dataclass(frozen=True)
class BrokenBackend:
    """An installed entry point that could not be loaded."""

    name: str
    error: str


@functools.cache
def discover() -> tuple[tuple[BackendInfo, ...], tuple[BrokenBackend, ...]]:
    """Read the entry points, once. Languages come in name order, which is also their order of preference."""
    from importlib.metadata import entry_points

    found: dict[str, BackendInfo] = {}
    broken = []
    for entry in sorted(entry_points(group="liger.backends"), key=lambda e: e.name):
        try:
            info = entry.load()
            if not isinstance(info, BackendInfo):
                raise TypeError(f"{entry.value} is a {type(info).__name__}, not a BackendInfo")
            if info.language in found and found[info.language] != info:
                raise ValueError(f"language {info.language!r} is already declared by {found[info.language].package}")
            spec = find_spec(info.package)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(
                    f"{entry.value} declares package {info.package!r}, which is not an importable package"
                )
        except LOAD_ERRORS as error:
            broken.append(BrokenBackend(entry.name, f"{type(error).__name__}: {error}"))
        else:
            found[info.language] = info
    return tuple(found[name] for name in sorted(found)), tuple(broken)


def backends() -> tuple[BackendInfo, ...]:
    """Every kernel language that an installed package declares, in name order."""
    return discover()[0]


def absent_languages() -> list[str]:
    """The languages among liger-core's extras that no installed package declares."""
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        extras = metadata("liger-core").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return []
    installed = {b.language for b in backends()} | {b.name for b in discover()[1]}
    return [extra for extra in extras if extra not in installed]


def not_installed(language: str) -> str:
    """What to tell somebody who asks for a language that no installed package declares."""
    for entry in discover()[1]:
        if entry.name == language:
            return f"{language} is installed but can't be imported: {entry.error}"
    if language in absent_languages():
        return f'{language} is not installed: uv pip install "liger-core[{language}]"'
    installed = ", ".join(["torch", *(b.language for b in backends())])
    return f"there is no language {language!r}; installed: {installed}"
