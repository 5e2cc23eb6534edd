"""The declaration of a kernel package about itself, and the discovery of the installed packages."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from liger_core import composed

# Extras of liger-core whose packages hold no kernels.
NO_LANGUAGES = ("transformers", "distributed")


class Unsupported(NotImplementedError):
    """The language that was asked for can't take this call. The message says why, and what to do."""


def _is_identifier(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


@dataclass(frozen=True)
class BackendInfo:
    """A kernel language: where it runs and which package holds its kernels.

    A package points to its instance with an entry point of the group ``liger.backends``. A file
    ``<package>/ops/<op>.py`` is the declaration that the language implements that op; there is no other registration. Ops that
    core makes of a language's kernels need no file: `liger_core.composed` lists them.

    Args:
        language: name of the kernel language, such as ``"triton"``.
        devices: torch device types that the kernels run on, such as ``("cuda", "xpu")``.
        default_devices: those of `devices` where the language is chosen without being asked for.
        requires: top-level module that the kernels import, such as ``"triton"``. It is looked for, not imported.
        package: import name of the package that holds ``ops/``.
        install: the command that installs the language, shown when `requires` is missing.
        refuses: called with a device type at the first dispatch to it; says why this machine can't run the kernels
            (an old driver, a missing compiler) and how to fix it, or returns None.
        tells_launches: whether the package tells `liger_core.replay` of each launch, so that calls can be replayed.

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
    tells_launches: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", self.language) or self.language == "torch":
            raise ValueError(
                f"BackendInfo: language is {self.language!r}; it takes lower-case words joined by '-', not 'torch'"
            )
        for field in ("devices", "default_devices"):
            value: Any = getattr(self, field)
            if type(value) is not tuple or not all(map(_is_identifier, cast("tuple[Any, ...]", value))):
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
        try:
            return self.refuses(device) if self.refuses else None
        except (Exception, SystemExit) as error:  # the package's own: the other languages go on without it
            return f"{self.package} can't say whether it runs on {device}: {type(error).__name__}: {error}"

    def broken(self) -> str | None:
        """Why the package's ``ops/__init__.py`` can't be imported, or None. It is imported here; no kernel is."""
        name = f"{self.package}.ops"
        try:
            if find_spec(name) is not None:
                importlib.import_module(name)
        except (Exception, SystemExit) as error:  # the package's own: the other languages go on without it
            return f"{name} can't be imported: {type(error).__name__}: {error}"
        return None

    def has_kernel(self, op: str) -> bool:
        """Whether the package has a kernel for `op`, and is not `broken`. Imports no kernel."""
        return self.broken() is None and composed.has_kernel(self.package, op)

    def kernel(self, op: str) -> ModuleType:
        """The module that implements `op`, imported."""
        return composed.kernel_of(self.package, op)


@dataclass(frozen=True)
class BrokenBackend:
    """An entry point that could not be loaded, or a language that several packages declare (a `conflict`)."""

    name: str
    error: str
    conflict: bool = False


@functools.cache
def discover() -> tuple[tuple[BackendInfo, ...], tuple[BrokenBackend, ...]]:
    """Read the entry points, once. Languages come in name order, which is also their order of preference.

    Of a language that several packages declare none is used: the name of an entry point doesn't choose between them.
    """
    from importlib.metadata import entry_points

    declared: dict[str, dict[BackendInfo, str]] = {}
    broken: list[BrokenBackend] = []
    for entry in sorted(entry_points(group="liger.backends"), key=lambda e: e.name):
        try:
            info = entry.load()
            if not isinstance(info, BackendInfo):
                raise TypeError(f"{entry.value} is a {type(info).__name__}, not a BackendInfo")
            spec = find_spec(info.package)
            if spec is None or spec.submodule_search_locations is None:
                raise ImportError(
                    f"{entry.value} declares package {info.package!r}, which is not an importable package"
                )
        except (Exception, SystemExit) as error:  # whatever it is, the package's own: the others go on without it
            broken.append(BrokenBackend(entry.name, f"{type(error).__name__}: {error}"))
        else:
            declared.setdefault(info.language, {}).setdefault(info, f"{info.package} (entry point {entry.name!r})")
    languages: list[BackendInfo] = []
    for language, packages in sorted(declared.items()):
        if len(packages) == 1:
            languages += packages
        else:
            error = f"{' and '.join(packages.values())} both declare the language {language!r}"
            broken.append(BrokenBackend(language, error, conflict=True))
    return tuple(languages), tuple(broken)


def backends() -> tuple[BackendInfo, ...]:
    """Every kernel language that an installed package declares, in name order."""
    return discover()[0]


def broken_backends() -> tuple[BrokenBackend, ...]:
    """Every entry point of a kernel language that could not be loaded, and every language that several packages declare."""
    return discover()[1]


def _extras() -> list[str]:
    from importlib.metadata import PackageNotFoundError, metadata

    try:
        return metadata("liger-core").get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return []


def absent_languages() -> list[str]:
    """The languages among liger-core's extras that no installed package declares."""
    installed = {b.language for b in backends()} | {b.name for b in broken_backends()}
    return [extra for extra in _extras() if extra not in installed and extra not in NO_LANGUAGES]


def absent_packages() -> list[str]:
    """liger-core's extras that are no languages and are not installed."""
    return [extra for extra in _extras() if extra in NO_LANGUAGES and find_spec(f"liger_{extra}") is None]


def install_command(extra: str) -> str:
    """The command that installs an extra of liger-core from where liger-core itself came: a checkout, a folder of wheels or an
    index.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    text = None
    with contextlib.suppress(PackageNotFoundError):
        text = distribution("liger-core").read_text("direct_url.json")
    origin: dict[str, Any] = json.loads(text or "{}")
    folder, _, file = unquote(urlsplit(str(origin.get("url", ""))).path).rpartition("/")
    if "dir_info" in origin:
        return f"uv pip install {shlex.quote(f'{folder}/liger-{extra}')}"
    if file.endswith(".whl"):
        return f'uv pip install --find-links {shlex.quote(folder)} "liger-core[{extra}]"'
    return f'uv pip install "liger-core[{extra}]"'


def close_to(name: str, known: Iterable[str]) -> str:
    """Names that somebody may have meant by `name`, as a part of an error text."""
    close = difflib.get_close_matches(name, list(known))
    return f"; close to it: {', '.join(close)}" if close else ""


def not_installed(language: str) -> str:
    """The error text for a language that no installed package declares."""
    for entry in broken_backends():
        if entry.name == language:
            return (
                f"{entry.error}: uninstall one"
                if entry.conflict
                else f"{language} is installed but can't be imported: {entry.error}"
            )
    if language in absent_languages():
        return f"{language} is not installed: {install_command(language)}"
    installed = ["torch", *(b.language for b in backends())]
    close = close_to(language, [*installed, *absent_languages()])
    return f"there is no language {language!r}{close}; installed: {', '.join(installed)}"
