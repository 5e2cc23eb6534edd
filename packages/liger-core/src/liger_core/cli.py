"""The `liger` command: what is installed, which kernel runs, and what each language implements."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

import liger_core
from liger_core.backend import absent_languages, absent_packages, backends, install_command
from liger_core.devices import infer_device
from liger_core.doctor import examine, installed_version, no_device
from liger_core.op import ops

HINTS = {"liger-transformers": ": `liger-transformers MODEL_TYPE` prints what it swaps"}


CLOSED_PIPE = 141
"""A shell's exit status of a command that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (1: doctor found a problem)."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # of `liger matrix | head`: nobody reads on
        # Python would flush the rest once more at exit, and print that it can't.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="liger", description=__doc__)
    parser.add_argument("--version", action="version", version=f"liger-core {installed_version('liger-core')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what is installed, what is missing, and how to get it")
    doctor.add_argument("--json", action="store_true", help="for a bug report, or a program")
    doctor.set_defaults(run=lambda options: run_doctor(options.json))
    where = commands.add_parser("where", help="which kernel an op runs, and why not the others")
    where.add_argument("op", help="such as rms_norm")
    where.add_argument("--device", help="a torch device or its type (default: this machine's)")
    where.set_defaults(run=lambda options: run_where(options.op, options.device))
    matrix = commands.add_parser("matrix", help="which language implements which op on which device")
    matrix.add_argument("--json", action="store_true", help="for a program")
    matrix.set_defaults(run=lambda options: run_matrix(options.json))
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, liger_core.Unsupported) as error:
        print(f"liger: {error}", file=sys.stderr)
        return 2


def run_doctor(as_json: bool) -> int:
    """Print what is installed; 1 if there is a problem, 0 otherwise."""
    diagnosis = examine()
    if as_json:
        print(json.dumps(asdict(diagnosis), indent=2))
        return 1 if diagnosis.problems else 0
    name = f" ({diagnosis.device_name})" if diagnosis.device_name else ""
    runs = "the PyTorch reference" if diagnosis.runs == "torch" else diagnosis.runs
    print(f"python {diagnosis.python}, torch {diagnosis.torch}, liger-core {diagnosis.liger_core}")
    print(f"device {diagnosis.device}{name}: {runs} runs by default")
    print()
    for language in diagnosis.languages:
        print(f"{language.language} ({language.package} {language.version}), for {', '.join(language.devices)}")
        print(f"  {language.kernels} of {diagnosis.ops} ops")
        for device, state in language.devices.items():
            print(f"  {device}: {state}")
    for package, version in diagnosis.packages.items():
        print(f"{package} {version}{HINTS.get(package, '')}")
    print_absent()
    for problem in diagnosis.problems:
        print(f"\nproblem: {problem.what}\n  fix:   {problem.fix}")
    return 1 if diagnosis.problems else 0


def run_where(op: str, device: str | None) -> int:
    """Print the candidates of an op; 1 when a call would raise `Unsupported`."""
    explanation = liger_core.explain(op, device=device)
    print(explanation)
    if absent := no_device(explanation.device, infer_device()):
        print(f"{absent}: this would run on one that has it")
    return 0 if explanation.chosen else 1


def run_matrix(as_json: bool) -> int:
    """Print op × language × device; as JSON, the devices of each language that has a kernel of the op."""
    columns = [(b, device) for b in backends() for device in b.devices]
    if as_json:
        kernels = {op: {b.language: list(b.devices) for b in backends() if b.has_kernel(op)} for op in sorted(ops)}
        print(json.dumps(kernels, indent=2))
        return 0
    if not columns:
        print("No kernel language is installed: every op runs the PyTorch reference, on every device.")
        print(*(f"  {op}" for op in sorted(ops)), sep="\n")
        print_absent()
        return 0
    heads = [f"{b.language}/{device}" for b, device in columns] + ["torch"]
    width = max(map(len, ops))
    print(" " * width, *heads, sep="  ")
    for op in sorted(ops):
        cells = ["yes" if b.has_kernel(op) else "-" for b, _ in columns] + ["yes"]
        print(op.ljust(width), *(cell.ljust(len(head)) for cell, head in zip(cells, heads, strict=True)), sep="  ")
    print("\ntorch is the PyTorch reference, on every device.")
    return 0


def print_absent() -> None:
    """Print how to get what is not installed."""
    if languages := absent_languages():
        print(
            "\nLanguages that are not installed; each is for its own devices, and not every two fit in one environment:"
        )
        print(*(f"  {language}: {install_command(language)}" for language in languages), sep="\n")
    if packages := absent_packages():
        print("\nPackages that are not installed:")
        print(*(f"  liger-{name}: {install_command(name)}" for name in packages), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
