"""The quick suite run on mutants: ``python -m liger_conformance.mutants --impl triton --op swiglu --number 50 --seed 1``."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from liger_conformance import interpreters
from liger_conformance.mutants.changes import changes_of
from liger_conformance.mutants.faults import FAULTS, OF_GRADIENTS
from liger_conformance.mutants.running import Mutant, Suite, imports
from liger_conformance.reach import sources_of
from liger_core.backend import backends, not_installed
from liger_core.composed import COMPOSED
from liger_core.contract import ops


def main() -> int:
    """Run the command: 0 if each mutant was killed, was never reached, or is known to survive."""
    parser = argparse.ArgumentParser(prog="python -m liger_conformance.mutants", description=__doc__)
    parser.add_argument("--impl", required=True, metavar="LANGUAGE", help="the language whose kernels are changed")
    parser.add_argument(
        "--op", action="append", help="an op (repeatable; default: all, in an order that the seed decides)"
    )
    parser.add_argument("--number", type=int, default=50, help="mutants of each op (default: 50), half of them faults")
    parser.add_argument("--seed", type=int, default=0, help="other mutants for each seed (default: 0)")
    parser.add_argument("--name", default="", metavar="TEXT", help="mutants with this text in their name")
    parser.add_argument("--only", choices=("changes", "faults"), help="one of the two families")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="add a line of JSON per mutant; those it has are not run"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after this time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which the suite hangs (default: 300)")
    given = parser.parse_args()
    until = time.time() + given.seconds
    interpreters.prepare("cpu")  # before languages are looked for, which then run there
    backend = next((b for b in backends() if b.language == given.impl), None)
    if backend is None:
        parser.error(f"--impl={given.impl}: {not_installed(given.impl)}")
    claimed = [op for op in sorted(ops) if backend.has_kernel(op)]
    if missing := [op for op in given.op or () if op not in claimed]:
        parser.error(f"--op={missing[0]}: {backend.package} has {', '.join(claimed)}")
    judgement = Judgement(known_mutants(backend.package))
    recorded = {(line["op"], line["name"]): line for line in map(json.loads, lines_of(given.record))}
    suite = Suite(backend, given.limit)
    for op in given.op or random.Random(given.seed).sample(claimed, len(claimed)):
        every = mutants_of(backend.package, op)
        judgement.require_names(op, {mutant.name for mutant in every})
        named = [mutant for mutant in every if given.name in mutant.name]
        for mutant in chosen(named, given.number, random.Random(f"{given.seed}/{op}"), given.only):
            outcome = recorded.get((op, mutant.name))
            if outcome is None and time.time() > until:
                break
            if outcome is None:
                outcome = {"op": op, "impl": given.impl, "name": mutant.name, **suite.run(mutant)}
                if given.record:
                    with given.record.open("a", encoding="utf-8") as record:
                        record.write(json.dumps(outcome) + "\n")
            verdict = judgement.add(op, outcome)
            print(f"{verdict:13} {outcome['seconds']:5.1f} s  {op} {mutant.name} | {outcome['by']}", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in sorted(judgement.verdicts.items())))
    for line in judgement.wrong:
        print(line, file=sys.stderr)
    return 1 if judgement.wrong else 0


def lines_of(record: Path | None) -> list[str]:
    return record.read_text("utf-8").splitlines() if record is not None and record.exists() else []


class Judgement:
    """Verdicts counted, and lines that say which mutants and declarations are wrong.

    Args:
        known: reasons of mutants that may survive, by op and name.
    """

    def __init__(self, known: dict[str, str]) -> None:
        self.known, self.verdicts, self.wrong = known, Counter[str](), list[str]()

    def require_names(self, op: str, names: set[str]) -> None:
        """Note declarations of an op that name none of its mutants."""
        declared = [key for key in self.known if key.partition(" ")[0] == op]
        self.wrong += [f"{key}: there is no such mutant" for key in declared if key.partition(" ")[2] not in names]

    def add(self, op: str, outcome: dict[str, Any]) -> str:
        """Count an outcome: its verdict, "known" for a survivor that is declared."""
        key, verdict = f"{op} {outcome['name']}", outcome["verdict"]
        if key in self.known and verdict == "survived":
            verdict = "known"
        elif key in self.known:
            self.wrong.append(f"{key}: known_mutants declares that it survives, and it is {verdict}")
        elif verdict == "survived":
            self.wrong.append(f"{key}: survived")
        self.verdicts[verdict] += 1
        return verdict


def known_mutants(package: str) -> dict[str, str]:
    """Mutants that a person has judged, with the reason: `KNOWN_MUTANTS` of a package's known_mutants.py, by op and name."""
    if find_spec(f"{package}.known_mutants") is None:
        return {}
    declared: dict[str, str] = importlib.import_module(f"{package}.known_mutants").KNOWN_MUTANTS
    for key, reason in declared.items():
        if not reason.strip():
            raise ValueError(f"{package}.known_mutants: {key!r} takes a reason")
    return declared


def mutants_of(package: str, op: str) -> list[Mutant]:
    """The faults of an op, and the changes of its own file and of those with kernels that this imports; by kind and place."""
    sources = {source.name: source for source in sources_of(package)}
    own = COMPOSED[op].files if op in COMPOSED else [op]
    own = [file for file in own if file in sources]
    imported = [file for name in own for file in imports(sources[name].path, package) if sources[file].kernels]
    files = dict.fromkeys([*own, *imported])
    changes = [Mutant(op, c.name, c.kind, c) for file in files for c in changes_of(sources[file].path)]
    faults = [name for name in FAULTS if ops[op].differentiable or name not in OF_GRADIENTS]
    return [*changes, *(Mutant(op, f"fault: {name}", "fault", None) for name in faults)]


def chosen(mutants: list[Mutant], number: int, source: random.Random, only: str | None) -> list[Mutant]:
    """So many of the mutants: changes, their kinds in turn, and faults, in turn."""
    source.shuffle(mutants)
    faults = [mutant for mutant in mutants if mutant.change is None]
    kinds: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        if mutant.change is not None:
            kinds.setdefault(mutant.kind, []).append(mutant)
    longest = max(map(len, kinds.values()), default=0)
    changes = [of_kind[i] for i in range(longest) for of_kind in kinds.values() if i < len(of_kind)]
    if only is not None:
        return (changes if only == "changes" else faults)[:number]
    half = min(len(faults), number // 2)
    return [*changes[: number - half], *faults[:half]]


if __name__ == "__main__":
    sys.exit(main())
