"""What tileiras 13.4 can't keep in registers or load in bulk, which liger-conformance's ``--compile`` otherwise fails."""

KNOWN_SPILLS: dict[str, tuple[int, str]] = {}
KNOWN_LOSSES: dict[str, tuple[str, str]] = {}
