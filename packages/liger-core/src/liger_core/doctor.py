"""The diagnosis that `liger doctor` prints: what is installed here, what runs, what is wrong, and how to fix it."""

from __future__ import annotations

import getpass
import importlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

import torch

from liger_core.backend import (
    NO_LANGUAGES,
    BackendInfo,
    absent_languages,
    absent_packages,
    backends,
    broken_backends,
    install_command,
)
from liger_core.devices import infer_device
from liger_core.explanation import get_current_backend
from liger_core.op import ops


@dataclass(frozen=True)
class Problem:
    """Something that is wrong."""

    what: str
    fix: str  # what to do about it


@dataclass(frozen=True)
class Language:
    """An installed kernel language."""

    language: str
    package: str
    version: str
    kernels: int  # of how many ops
    devices: dict[str, str]  # device type: "ready", or why not


@dataclass(frozen=True)
class Diagnosis:
    """The facts that `liger doctor` prints."""

    python: str
    torch: str
    liger_core: str
    device: str  # a torch device type
    device_name: str | None
    runs: str  # the language that runs by default on the device; "torch" is the reference
    ops: int
    languages: list[Language]
    packages: dict[str, str]  # installed packages that are no language, with their versions
    absent: dict[str, str]  # extras of liger-core that are not installed, with the command that does it
    problems: list[Problem]


def examine() -> Diagnosis:
    """Look at everything. Imports each kernel package's ``ops/__init__.py``, and no kernel."""
    device = infer_device()
    chosen = get_current_backend(device)
    return Diagnosis(
        python=platform.python_version(),
        torch=torch.__version__,
        liger_core=installed_version("liger-core"),
        device=device,
        device_name=getattr(torch, device).get_device_name() if device != "cpu" else None,
        runs=chosen.language if chosen else "torch",
        ops=len(ops),
        languages=[_language(backend, device) for backend in backends()],
        packages={
            f"liger-{name}": installed_version(f"liger-{name}") for name in NO_LANGUAGES if find_spec(f"liger_{name}")
        },
        absent={name: install_command(name) for name in (*absent_languages(), *absent_packages())},
        problems=[
            *_broken(device),
            *_reference_on_an_accelerator(device),
            *_overwritten(),
            *_outside_their_ranges(),
            *_caches(),
        ],
    )


def installed_version(package: str) -> str:
    """A package's version, by its import name or its distribution's."""
    try:
        return version(package.partition(".")[0].replace("_", "-"))
    except PackageNotFoundError:
        return "not installed as a distribution"


def _language(backend: BackendInfo, device: str) -> Language:
    places: dict[str, str] = {}
    for place in backend.devices:
        places[place] = backend.missing(place) or no_device(place, device) or "ready"
    kernels = sum(backend.has_kernel(op) for op in ops)
    return Language(backend.language, backend.package, installed_version(backend.package), kernels, places)


def no_device(device: str, here: str) -> str | None:
    """The text for a device type that this machine, whose accelerator is `here`, lacks; None if it has it."""
    return f"no {device} device on this machine" if device not in (here, "cpu") else None


def _broken(device: str) -> Iterator[Problem]:
    """Packages that can't be imported, and languages that can't run on this machine's device."""
    for entry in broken_backends():
        if entry.conflict:
            yield Problem(entry.error, "uninstall one of them")
            continue
        yield Problem(f"{entry.name} can't be imported: {entry.error}", "reinstall its package, or uninstall it")
    for backend in backends():
        if why := backend.broken():
            yield Problem(why, "reinstall its package, or uninstall it")
        elif device in backend.devices and (why := backend.missing(device)):
            problem, _, fix = why.partition(": ")
            yield Problem(f"{backend.language} can't run on this machine's {device}: {problem}", fix or backend.install)


def _reference_on_an_accelerator(device: str) -> Iterator[Problem]:
    if device == "cpu" or get_current_backend(device) is not None:
        return
    if able := [b.language for b in backends() if b.missing(device) is None]:
        yield Problem(
            f"the PyTorch reference runs on {device}, since no installed language runs there by default",
            f'LIGER_LANGUAGE={able[0]}, or liger_core.use("{able[0]}")',
        )
    else:
        extras = {"cuda": "triton", "xpu": "triton", "npu": "triton-ascend"}
        yield Problem(
            f"the PyTorch reference runs on {device}, since no kernel language is installed for it",
            install_command(extras[device]) if device in extras else "see docs/adding-a-backend.md",
        )


def _overwritten() -> Iterator[Problem]:
    """Installed distributions that wrote to the same files, so that one of them is not what it says it is.

    Only packages that liger loads count: others share an empty ``__init__.py``, without harm.
    """
    ours = {"liger_core", *(name.partition(".")[0] for b in backends() for name in (b.package, b.requires))}
    owners: dict[str, list[str]] = {}
    for distribution in distributions():
        for path in distribution.files or ():
            if len(path.parts) == 2 and path.name == "__init__.py" and path.parts[0] in ours:
                owners.setdefault(path.parts[0], []).append(distribution.metadata["Name"])
    for package, names in sorted(owners.items()):
        if len(set(names)) > 1:
            both = " and ".join(sorted(set(names)))
            yield Problem(f"{both} both installed the package {package!r}", "uninstall both, then install one")


def _outside_their_ranges() -> Iterator[Problem]:
    """Requirements of liger's packages that what is installed doesn't meet.

    Without the package packaging, which pip and PyTorch's own tools bring, nothing can be compared.
    """
    if find_spec("packaging") is None:
        return
    requirements = importlib.import_module("packaging.requirements")
    for distribution in _liger_distributions():
        for text in distribution.requires or ():
            requirement = requirements.Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                installed = version(requirement.name)
            except PackageNotFoundError:
                continue  # a language that lacks something says so itself
            if not requirement.specifier.contains(installed, prereleases=True):
                name = distribution.metadata["Name"]
                yield Problem(
                    f"{name} {distribution.version} needs {requirement.name}{requirement.specifier}; {installed} is installed",
                    f'uv pip install --upgrade {name} "{requirement.name}{requirement.specifier}"',
                )


def _liger_distributions() -> list[Distribution]:
    packages = {d.metadata["Name"]: d for d in distributions() if str(d.metadata["Name"]).startswith("liger-")}
    return [packages[name] for name in sorted(packages) if name != "liger-kernel"]


def _caches() -> Iterator[Problem]:
    """Cache folders of compiled kernels that can't be found or written."""
    usual: dict[str, Callable[[], Path]] = {}
    if find_spec("triton") is not None:
        usual["TRITON_CACHE_DIR"] = lambda: Path.home() / ".triton" / "cache"
    usual["TORCHINDUCTOR_CACHE_DIR"] = lambda: Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    for variable, find in usual.items():
        fix = f"{variable}=<a folder that can be written>"
        try:
            folder = Path(os.environ.get(variable) or find())
        except (RuntimeError, KeyError, OSError) as error:  # a user without a name, or without a home directory
            yield Problem(f"the folder where compiled kernels are kept can't be found: {error}", fix)
            continue
        # `Path.exists` raises for a folder inside of one that can't be read.
        existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            yield Problem(f"{folder}, where compiled kernels are kept, can't be written", fix)
