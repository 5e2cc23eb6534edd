"""Failures that an implementation knows of, and declares in its own package."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection
from importlib.util import find_spec


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


class KnownSpills:
    """Kernels that are known to keep registers in memory, or to go without fast instructions, and why they may.

    A package declares them in ``<package>/known_spills.py``:

        KNOWN_SPILLS = {"softmax-triton-sm_90 softmax._backward[*BLOCK=32768*]": (24, "a row of 32 columns a thread: ...")}
        KNOWN_LOSSES = {"softmax-cutile-sm_* softmax._forward[*": ("*only supports zero padding", "-inf is needed: ...")}

    A key is a test's op, language and chip, a space, and a kernel with its variant as the report has them; ``*`` stands
    for anything. A value is the most registers that it spills, or what the compiler says that it lost; and why that is
    accepted. A declaration is strict: on each chip that it names, some kernel that it names does so.

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
                    if not any(matches(target, found) for found in targets):
                        raise ValueError(f"{package}.known_spills: {key!r} is of no op, language and chip")
                    known.append((target, kernel, what))

    def allowed(self, target: str, kernel: str) -> int:
        """How many registers a kernel may spill."""
        return max((most for pattern, most in self.of(target) if matches(pattern, kernel)), default=0)

    def allows_loss(self, target: str, kernel: str, what: str) -> bool:
        """Whether a kernel may go without a fast instruction, where the compiler says so in these words."""
        return any(matches(pattern, kernel) and matches(loss, what) for pattern, loss in self.losses_of(target))

    def of(self, target: str) -> list[tuple[str, int]]:
        """The kernels, as patterns, that are declared for an op, language and chip, and how much they may spill."""
        return [(kernel, most) for name, kernel, most in self._spills if matches(name, target)]

    def losses_of(self, target: str) -> list[tuple[str, str]]:
        """The kernels, as patterns, that are declared for an op, language and chip, and what they may lose."""
        return [(kernel, what) for name, kernel, what in self._losses if matches(name, target)]


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
