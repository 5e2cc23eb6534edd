"""The `liger` command: what is installed, which kernel runs, and what each language implements."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distributions, version

import torch

import liger_core
from liger_core.backend import BackendInfo, absent_languages, backends, discover, not_installed
from liger_core.contract import ops as contract_ops


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (1: doctor found something to mend)."""
    parser = argparse.ArgumentParser(prog="liger", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what is installed, what is missing, and how to get it")
    doctor.set_defaults(run=lambda options: run_doctor())
    where = commands.add_parser("where", help="which kernel an op runs, and why not the others")
    where.add_argument("op", help="such as rms_norm")
    where.add_argument("--device", help="a torch device or its type (default: this machine's)")
    where.set_defaults(run=lambda options: run_where(options.op, options.device))
    matrix = commands.add_parser("matrix", help="which language implements which op on which device")
    matrix.set_defaults(run=lambda options: run_matrix())
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, liger_core.Unsupported) as error:
        print(f"liger: {error}", file=sys.stderr)
        return 2


def run_doctor() -> int:
    """Print what is installed; 1 when something is broken, 0 otherwise."""
    device = liger_core.infer_device()
    chosen = liger_core.get_current_backend(device)
    print(f"python {platform.python_version()}, torch {torch.__version__}, liger-core {_version('liger-core')}")
    print(
        f"device {device}{_device_name(device)}: {chosen.language if chosen else 'the PyTorch reference'} runs by default"
    )
    print()
    problems = []
    for backend in backends():
        print(f"{backend.language} ({backend.package} {_version(backend.package)}), for {', '.join(backend.devices)}")
        print(f"  {_count(backend)} of {len(contract_ops)} ops")
        for place in backend.devices:
            absent = f"no {place} device on this machine" if place not in (device, "cpu") else None
            print(f"  {place}: {backend.missing(place) or absent or 'ready'}")
    print_absent()
    for broken in discover()[1]:
        problems.append(f"{broken.name} can't be imported: {broken.error}")
    problems += overwritten_packages()
    for problem in problems:
        print(f"\nproblem: {problem}")
    return 1 if problems else 0


def run_where(op: str, device: str | None) -> int:
    """Print the candidates of an op; 1 when a call would raise `Unsupported`."""
    explanation = liger_core.explain(op, device=device)
    print(explanation)
    return 0 if explanation.chosen else 1


def run_matrix() -> int:
    """Print op × language × device."""
    columns = [(b, device) for b in backends() for device in b.devices]
    heads = [f"{b.language}/{device}" for b, device in columns]
    width = max(map(len, contract_ops))
    print(" " * width, *heads, sep="  ")
    for op in sorted(contract_ops):
        cells = ["yes" if b.has_kernel(op) else "-" for b, _ in columns]
        print(op.ljust(width), *(cell.ljust(len(head)) for cell, head in zip(cells, heads, strict=True)), sep="  ")
    print("\nThe PyTorch reference implements every op on every device.")
    if not columns:
        print_absent()
    return 0


def print_absent() -> None:
    """Print how to get the languages that are not installed."""
    if languages := absent_languages():
        print("\nEach for its own devices, and not every two in one environment:")
        print(*(f"  {not_installed(language)}" for language in languages), sep="\n")


def overwritten_packages() -> list[str]:
    """Installed distributions that wrote to the same files, so that one of them is not what it says it is.

    Only packages that liger loads count: others share an empty ``__init__.py``, without harm.
    """
    ours = {"liger_core", *(name.partition(".")[0] for b in backends() for name in (b.package, b.requires))}
    owners: dict[str, list[str]] = {}
    for distribution in distributions():
        for path in distribution.files or ():
            if len(path.parts) == 2 and path.name == "__init__.py" and path.parts[0] in ours:
                owners.setdefault(path.parts[0], []).append(distribution.metadata["Name"])
    return [
        f"{' and '.join(sorted(set(names)))} both installed the package {package!r}; uninstall both, then install one"
        for package, names in sorted(owners.items())
        if len(set(names)) > 1
    ]


def _count(backend: BackendInfo) -> int:
    return sum(backend.has_kernel(op) for op in contract_ops)


def _device_name(device: str) -> str:
    module = getattr(torch, device)
    return f" ({module.get_device_name()})" if device != "cpu" else ""


def _version(package: str) -> str:
    try:
        return version(package.partition(".")[0].replace("_", "-"))
    except PackageNotFoundError:
        return "not installed as a distribution"


if __name__ == "__main__":
    sys.exit(main())
