"""Failures that an implementation knows of, and declares in its own package."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec

from liger_conformance.case import cases_of
from liger_conformance.vary import DTYPES
from liger_core.contract import ops


class KnownFailures:
    """The declarations of the languages that are checked.

    A package declares them in ``<package>/known_failures.py``:

        KNOWN_FAILURES = {"test_values[rms_norm-acme-npu-odd-float16]": "why, https://where-it-is-tracked"}

    A key is a test's name; ``*`` stands for anything. A value gives the reason and a link. A declared test that passes
    fails the run, and so does a key that matches no test.

    Args:
        packages: language to import name of its package.

    Raises:
        ValueError: a declaration without a reason or a link.
    """

    def __init__(self, packages: dict[str, str]) -> None:
        self._declared: dict[str, dict[str, str]] = {}
        self._names: set[str] | None = None
        for language, package in packages.items():
            if find_spec(f"{package}.known_failures") is not None:
                declared = importlib.import_module(f"{package}.known_failures").KNOWN_FAILURES
                for key, reason in declared.items():
                    if not re.search(r"\S+\s+.*://|://\S+\s+\S+", reason):
                        raise ValueError(
                            f"{package}.known_failures: {key!r} has {reason!r}; it takes a reason and a link"
                        )
                self._declared[language] = declared

    @property
    def declares_any(self) -> bool:
        """Whether a language declares a failure."""
        return any(self._declared.values())

    def reason(self, language: str, name: str) -> str | None:
        """Why a test of a language is expected to fail, or None."""
        for key, reason in self._declared.get(language, {}).items():
            if matches(key, name):
                return reason
        return None

    def collected(self, names: set[str]) -> None:
        """Remember the names of the tests of a whole run."""
        self._names = names

    def unmatched(self, language: str) -> list[str]:
        """Declarations that match no test of this run, when all of the suite was collected."""
        if self._names is None:
            return []
        here = {re.sub(r"\[.*", "", name) for name in self._names}
        return [
            key
            for key in self._declared.get(language, {})
            if re.sub(r"\[.*", "", key) in here | {key} and not any(matches(key, name) for name in self._names)
        ]


class Unclaimed:
    """The first cases of ops that a language's kernels refuse, and why.

    Every other kernel takes its op's first case, in every dtype. A package declares them in ``<package>/unclaimed.py``:

        UNCLAIMED = {"swiglu-odd-*": "rows are loaded by 16 elements"}

    A key is an op, the id of its first case and a dtype; ``*`` stands for anything. A declaration is strict: each case
    that it names is refused.

    Args:
        packages: language to import name of its package.

    Raises:
        ValueError: a declaration without a reason, or of no op.
    """

    def __init__(self, packages: dict[str, str]) -> None:
        self._declared: dict[str, tuple[str, ...]] = {}
        for language, package in packages.items():
            if find_spec(f"{package}.unclaimed") is None:
                continue
            declared = importlib.import_module(f"{package}.unclaimed").UNCLAIMED
            for key, reason in declared.items():
                if not reason.strip():
                    raise ValueError(f"{package}.unclaimed: {key!r} takes a reason")
                if not any(matches(key, f"{op}-{case_id}-{dtype}") for op, case_id, dtype in _first_cases()):
                    raise ValueError(f"{package}.unclaimed: {key!r} is of no op, its first case and a dtype")
            self._declared[language] = tuple(declared)

    def declares(self, language: str, call: str) -> bool:
        """Whether a language declares that it refuses a call, named by op, case and dtype."""
        return any(matches(key, call) for key in self._declared.get(language, ()))


def _first_cases() -> Iterator[tuple[str, str, str]]:
    for op in ops:
        for dtype in DTYPES:
            yield op, cases_of(op).cases[0].id, str(dtype).removeprefix("torch.")


class KnownSpills:
    """Kernels that are known to keep registers in memory, or to go without fast instructions, and why they may.

    A package declares them in ``<package>/known_spills.py``:

        KNOWN_SPILLS = {"softmax-triton-sm_90 softmax._backward[*BLOCK=32768*]": (24, "a row of 32 columns a thread: ...")}
        KNOWN_LOSSES = {"softmax-cutile-sm_* softmax._forward[*": ("*only supports zero padding", "-inf is needed: ...")}

    A key is a test's op, language and chip, a space, and a kernel with its variant as the report has them; ``*`` stands
    for anything. A value is the most registers that it spills, or what the compiler says that it lost; and why that is
    accepted. A declaration is strict: on each chip that it names, some kernel that it names does so. The file is Python:
    what only one version of a compiler does is declared under an ``if`` of that version.

    Args:
        packages: language to import name of its package.
        targets: every op, language and chip that there is, joined by '-'.

    Raises:
        ValueError: a declaration without a reason, or of something that doesn't exist.
    """

    def __init__(self, packages: dict[str, str], targets: Collection[str]) -> None:
        self._spills: list[tuple[str, str, int]] = []
        self._losses: list[tuple[str, str, str]] = []
        for package in packages.values():
            if find_spec(f"{package}.known_spills") is None:
                continue
            module = importlib.import_module(f"{package}.known_spills")
            for name, known in (("KNOWN_SPILLS", self._spills), ("KNOWN_LOSSES", self._losses)):
                for key, (what, reason) in getattr(module, name, {}).items():
                    target, _, kernel = key.partition(" ")
                    if not reason.strip():
                        raise ValueError(f"{package}.known_spills: {key!r} takes a reason")
                    if not any(matches(target, known_target) for known_target in targets):
                        raise ValueError(f"{package}.known_spills: {key!r} is of no op, language and chip")
                    known.append((target, kernel, what))

    def allowed(self, target: str, kernel: str) -> int:
        """How many registers a kernel may spill."""
        return max((most for pattern, most in self.of(target) if matches(pattern, kernel)), default=0)

    def allows_loss(self, target: str, kernel: str, what: str) -> bool:
        """Whether a kernel may go without a fast instruction, where the compiler says so in these words."""
        return any(matches(pattern, kernel) and matches(loss, what) for pattern, loss in self.losses_of(target))

    def declares(self, target: str) -> bool:
        """Whether anything is declared for an op, language and chip."""
        return bool(self.of(target) or self.losses_of(target))

    def of(self, target: str) -> list[tuple[str, int]]:
        """The kernels, as patterns, that are declared for an op, language and chip, and how much they may spill."""
        return [(kernel, most) for name, kernel, most in self._spills if matches(name, target)]

    def losses_of(self, target: str) -> list[tuple[str, str]]:
        """The kernels, as patterns, that are declared for an op, language and chip, and what they may lose."""
        return [(kernel, what) for name, kernel, what in self._losses if matches(name, target)]


class KnownUnreached:
    """Kernels and branches of host code that no case reaches, and why.

    A package declares them in ``<package>/uncovered.py``:

        UNCOVERED = {"interpreted _device.sm_count: device.type == 'cuda' is true": "an interpreter has no device"}

    A key is a lane, a space, and a name of `reach`; ``*`` stands for anything. The lanes are ``interpreted``; ``compiled``,
    for every chip; and ``compiled-sm_90``, for one alone. A declaration is strict: what it names is not reached.

    Args:
        package: import name of the package.

    Raises:
        ValueError: a declaration without a reason, or of no lane.
    """

    def __init__(self, package: str) -> None:
        self._declared: list[tuple[str, str]] = []
        if find_spec(f"{package}.uncovered") is None:
            return
        for key, reason in importlib.import_module(f"{package}.uncovered").UNCOVERED.items():
            lane, _, name = key.partition(" ")
            if not name or not re.match(r"interpreted$|compiled|\*$", lane):
                raise ValueError(f"{package}.uncovered: {key!r} takes a lane, a space and a name")
            if not reason.strip():
                raise ValueError(f"{package}.uncovered: {key!r} takes a reason")
            self._declared.append((lane, name))

    def of(self, lane: str) -> list[str]:
        """Names that are declared for a lane, as patterns."""
        return [name for pattern, name in self._declared if matches(pattern, lane)]


class AnySpills(KnownSpills):
    """For a compiler that the kernels weren't tuned for: whatever spills or loses the fast instructions may do so."""

    def __init__(self) -> None:
        super().__init__({}, ())

    def allowed(self, target: str, kernel: str) -> int:
        """Any number of registers."""
        return sys.maxsize

    def allows_loss(self, target: str, kernel: str, what: str) -> bool:
        """Any loss."""
        return True


def matches(key: str, name: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, key.split("*"))), name) is not None
