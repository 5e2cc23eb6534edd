"""Targets of a run: which languages are checked, on which devices or for which chips."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from platformdirs import user_cache_path

import liger_core
from liger_conformance import interpreters
from liger_conformance.compilers import compiler_of, cutile, executor_of
from liger_conformance.interpreters.tileir import capture
from liger_conformance.plugin.options import option
from liger_conformance.report import Report
from liger_conformance.target import Target
from liger_core import autograd
from liger_core.backend import BackendInfo, backends, not_installed
from liger_core.contract import ops


def targets_of_devices(config: pytest.Config) -> tuple[list[Target], Report]:
    """Targets that run: on an accelerator, or in an interpreter."""
    device = option(config, "--device") or liger_core.infer_device()
    interpreters.prepare(device)
    # Tests watch host code, which a replay doesn't run.
    autograd.REPLAY_AFTER = sys.maxsize
    capture.CACHE = _cache("tileir")
    targets: list[Target] = []
    report = Report(device)
    for language in option(config, "--impl") or ["torch", *(b.language for b in backends())]:
        if language == "torch":
            chosen, backend, lane = device, None, "passed"
        else:
            backend = _backend(language)
            chosen = device if device in backend.devices else "cpu" if "cpu" in backend.devices else device
            lane = "interpreted" if interpreters.interprets(backend, chosen) else "passed"
            why = backend.missing(chosen) or _absent(chosen)
            if why is None and chosen != device and option(config, "--device"):
                why = f"--device={device} was asked for, and {language} runs on {', '.join(backend.devices)}"
            if why is not None:
                if language in option(config, "--impl"):
                    raise pytest.UsageError(f"--impl={language} can't run here: {why}")
                report.not_run(language, chosen, why)
                continue
            if lane == "interpreted":
                interpreters.repair(backend)
        for name in sorted(option(config, "--op") or ops):
            if backend is None or backend.has_kernel(name):
                targets.append(Target(ops[name], language, chosen, backend, lane))
            else:
                report.not_claimed(name, language, chosen)
    return targets, report


def targets_of_chips(config: pytest.Config) -> tuple[list[Target], Report]:
    """Targets that are compiled and don't run; a target's device is then a chip."""
    if option(config, "--device"):
        raise pytest.UsageError("--compile runs on no device: leave out --device")
    cutile.CACHE = _cache("tileiras")
    execute = option(config, "--execute")
    asked = option(config, "--compile").split(",")
    targets: list[Target] = []
    known: set[str] = set()
    report = Report(None)
    for backend in map(_backend, option(config, "--impl") or [b.language for b in backends()]):
        language, compiler = backend.language, compiler_of(backend)
        why = "there is no compiler for it here" if compiler is None else compiler.obstacle()
        if execute and why is None:
            executor = executor_of(backend)
            why = "nothing here runs what it compiles to" if executor is None else executor.obstacle_to_execution()
        if compiler is None or why is not None:
            if language in option(config, "--impl"):
                raise pytest.UsageError(f"--impl={language} can't be compiled: {why}")
            report.not_run(language, "any chip", why or "")
            continue
        known |= set(compiler.chips)
        for chip in (c for c in compiler.chips if c in asked or asked == ["all"]):
            for name in sorted(option(config, "--op") or ops):
                if backend.has_kernel(name):
                    targets.append(Target(ops[name], language, chip, backend, "executed" if execute else "compiled"))
                else:
                    report.not_claimed(name, language, chip)
    if not known:
        reasons = [f"{language}: {why}" for language, _, why in report.languages_not_run]
        raise pytest.UsageError(f"--compile: {'; '.join(reasons) or 'no language is installed'}")
    if unknown := set(asked) - known - {"all"}:
        raise pytest.UsageError(f"--compile: no chip {', '.join(sorted(unknown))}; it takes {', '.join(sorted(known))}")
    return targets, report


def _cache(name: str) -> Path:
    """A folder in the user's cache."""
    return cutile.swept(user_cache_path("liger-conformance", appauthor=False) / name)


def chip_targets() -> list[str]:
    """Every op, language and chip that can be compiled for here, joined by '-'."""
    compilers = ((b.language, compiler) for b in backends() if (compiler := compiler_of(b)))
    return [f"{op}-{language}-{chip}" for language, compiler in compilers for chip in compiler.chips for op in ops]


def _backend(language: str) -> BackendInfo:
    backend = next((b for b in backends() if b.language == language), None)
    if backend is None:
        raise pytest.UsageError(f"--impl={language}: {not_installed(language)}")
    return backend


def _absent(device: str) -> str | None:
    if device == "cpu":
        return None
    module = getattr(torch, device, None)
    return None if module is not None and module.is_available() else f"this machine has no {device} device"
