"""Write what each op divides into liger-distributed's README, from the ops' declarations and that package's rules:

uv run python tools/sharding_table.py
"""

from __future__ import annotations

from pathlib import Path

from liger_core.contract import Op, ops
from liger_core.dimensions import independent
from liger_distributed.rules import RULES

README = Path(__file__).resolve().parent.parent / "packages/liger-distributed/README.md"
START, END = "<!-- tools/sharding_table.py -->\n", "<!-- end -->\n"


def free(op: Op[..., object]) -> list[str]:
    """The names along which any part of an op can be computed alone, in the order of its declaration."""
    assert op.dimensions is not None, f"{op.name} declares no dimensions"
    written = [name for names in op.dimensions.tensors.values() for name in names]
    return [name for name in dict.fromkeys(written) if independent(name) and not name.endswith("'")]


def counted(op: Op[..., object]) -> set[str]:
    """The names that a mean over labels has lost: over them its count is sent."""
    assert op.dimensions is not None
    tensors, results = op.dimensions.tensors, op.dimensions.results
    return {
        name for result in results if result.counted for name in tensors[result.counted] if name not in result.names
    }


def table() -> str:
    """A row per op."""
    rows = ["| op | sends nothing forward | sends one count | by a rule |", "|---|---|---|---|"]
    for name, op in sorted(ops.items()):
        more = RULES[name].divides if name in RULES else ()
        nothing = [dim for dim in free(op) if dim not in counted(op)]
        cells = [" ".join(f"`{dim}`" for dim in dims) for dims in (nothing, sorted(counted(op)), more)]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def written(text: str) -> str:
    """The page with the table of now."""
    return text[: text.index(START) + len(START)] + table() + text[text.index(END, text.index(START)) :]


if __name__ == "__main__":
    README.write_text(written(README.read_text("utf-8")), "utf-8")
