"""Failures that an implementation knows of, and declares in its own package."""

from __future__ import annotations

import importlib
import re
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
            if _matches(key, name):
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
            if re.sub(r"\[.*", "", key) in here | {key} and not any(_matches(key, name) for name in self._names)
        ]


def _matches(key: str, name: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, key.split("*"))), name) is not None
