"""The plugin's own entries of a run: pytest keeps them in `config.stash`."""

from __future__ import annotations

import pytest

from liger_conformance import reach
from liger_conformance.compilers.results import Results
from liger_conformance.known import KnownFailures, KnownSpills, Unclaimed
from liger_conformance.report import Report
from liger_conformance.target import Target

targets_key = pytest.StashKey[list[Target]]()
known_key = pytest.StashKey[KnownFailures]()
spills_key = pytest.StashKey[KnownSpills]()
unclaimed_key = pytest.StashKey[Unclaimed]()
report_key = pytest.StashKey[Report]()
failed_key = pytest.StashKey[bool]()
watch_key = pytest.StashKey[reach.Watch]()
results_key = pytest.StashKey[Results]()
part_key = pytest.StashKey[str]()
"""The reason why a run can't tell what the cases of a language reach, or compile: it is a part of them."""
