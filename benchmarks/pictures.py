"""Pictures of what was measured, drawn from the records of `compare.py` and `end_to_end.py` and from nothing else.

    python benchmarks/pictures.py                    docs/pictures/*.svg

A test draws them again and compares, so that it fails when a picture is stale. Their text follows the reader's dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import records

PICTURES = Path(__file__).parent.parent / "docs/pictures"
HEAT_MAP = "best-peer"
END_TO_END = "end-to-end"
MODEL = "llama-1b"
"""The model of `end_to_end.py` whose step is drawn."""

MACHINE = "NVIDIA H200"
"""The machine of every picture. Records of another machine are not drawn."""

GROUPS = ("small", "medium", "large")
MODES = ("forward", "forward+backward")

OURS = {"ours-triton": ("liger, Triton", "#1f77b4"), "ours-cutile": ("liger, cuTile", "#2a9d5c")}
KERNELS = {
    "liger": ("liger-kernel (Triton)", "#c0392b"),
    "liger-cutile": ("liger-kernel (cuTile)", "#d9776b"),
    "liger-cutedsl": ("liger-kernel (CuTe DSL)", "#8e44ad"),
}
PEERS = {
    "eager": ("PyTorch", "#9a9a9a"),
    "compile": ("torch.compile", "#e08214"),
    "grouped": ("PyTorch, grouped_mm", "#b35806"),
    **KERNELS,
    "quack": ("quack", "#b8860b"),
}
"""Providers of `compare.py`, with the name that a reader knows and a colour."""

COPIES, PRODUCTS = 4250.0, 790.0
"""Best rates of `MACHINE`: GB/s of a large copy, read and written, and TFLOP/s of a bfloat16 product of 8192 × 8192
matrices. Both were measured there by PyTorch 2.11."""

WAYS = {
    "plain": PEERS["eager"],
    "compile": PEERS["compile"],
    "liger": ("liger-kernel 0.8.5", KERNELS["liger"][1]),
    "triton": ("liger", OURS["ours-triton"][1]),
    "cutile": ("liger, cuTile", OURS["ours-cutile"][1]),
    "triton-compile": ("liger, torch.compile", "#6aaed6"),
    "triton-lean": ("liger, lean", "#3f51b5"),
    "triton-lean-compile": ("liger, lean, torch.compile", "#7986cb"),
}
"""The ways of `end_to_end.py`, from top to bottom, as a reader of a picture knows them."""

OUR_WAYS = ("triton", "cutile", "triton-compile", "triton-lean", "triton-lean-compile")


class Cell(NamedTuple):
    """Result of one provider in one case and mode."""

    ms: float
    peak_mib: float | None
    limit_ms: float | None
    machine: str


Op = dict[tuple[str, str], dict[str, Cell]]
"""The cells of an op by case and mode, then by provider."""


def sources(kind: str, directory: Path) -> list[Path]:
    """The records of a kind that `MACHINE` made, the newest measurement of an op last."""
    paths = [path for path in directory.glob(f"*-{kind}-*.csv") if machine(path) == MACHINE]
    # A run of a few ops is a second look at them, so it comes after the run of all ops of that day.
    return sorted(paths, key=lambda path: (path.name[:10], -len(ops_in(records.read_csv(path)[1])), path.name))


def machine(path: Path) -> str:
    """The accelerator of a record."""
    return records.read_csv(path)[0]["machine"].split(",")[0]


def ops_in(rows: Sequence[Mapping[str, str]]) -> set[str]:
    """The ops that a record has."""
    return {row["op"] for row in rows if "op" in row}


def read(paths: Sequence[Path]) -> dict[str, Op]:
    """The last measurement of every op."""
    ops: dict[str, Op] = {}
    for path in paths:
        rows = records.read_csv(path)[1]
        ops |= {op: {} for op in ops_in(rows)}
        for row in rows:
            if row["ms"] and row["case"] in GROUPS:
                cells = ops[row["op"]].setdefault((row["case"], row["mode"]), {})
                cells[row["provider"]] = cell(row, machine(path))
    return dict(sorted(ops.items()))


def cell(row: Mapping[str, str], chip: str) -> Cell:
    """A row of a record of `compare.py`, with the least time that `MACHINE` allows it."""
    ms, limit = float(row["ms"]), None
    if row["tflops"]:
        limit = ms * float(row["tflops"]) / PRODUCTS
    elif row["gbps"]:
        limit = ms * float(row["gbps"]) / COPIES
    return Cell(ms, float(row["peak_mib"]) if row["peak_mib"] else None, limit, chip)


def whole_steps(paths: Sequence[Path]) -> dict[str, Mapping[str, str]]:
    """The rows of a whole step of `MODEL`, by way; of two of one way, the later."""
    rows = [row for path in paths for row in records.read_csv(path)[1] if row["ms"] and not row["checkpointing"]]
    by_way = {row["way"]: row for row in rows if row["model"] == MODEL}
    return {way: by_way[way] for way in WAYS if way in by_way}


def best(cells: Mapping[str, Cell], providers: Mapping[str, object], key: str = "ms") -> tuple[float, str] | None:
    """The least value among some providers, and whose it is."""
    values = [(getattr(cells[name], key), name) for name in providers if name in cells]
    return min((value for value in values if value[0] is not None), default=None)


def ratio(
    op: Op, case: str, mode: str, peers: Mapping[str, object] = PEERS, key: str = "ms"
) -> tuple[float, str] | None:
    """The best peer's value over the best of ours, and the peer's name: above 1, ours is better."""
    cells = op.get((case, mode), {})
    ours, peer = best(cells, OURS, key), best(cells, peers, key)
    return (max(peer[0], 1e-9) / max(ours[0], 1e-9), peer[1]) if ours and peer else None


def counts(ops: Mapping[str, Op], noise: float = 0.02) -> list[tuple[str, int, int, int]]:
    """Rows of op and size in which liger is better than, as good as, and worse than its peers.

    The first two count the time beside the fastest of all peers, the others the memory beside liger-kernel, of each the best
    language.
    """
    lines = []
    for what, peers, key in (
        ("time, beside the fastest peer", PEERS, "ms"),
        ("memory, beside liger-kernel", KERNELS, "peak_mib"),
    ):
        for mode in MODES:
            pairs = [ratio(op, case, mode, peers, key) for op in ops.values() for case in GROUPS]
            ratios = [pair[0] for pair in pairs if pair]
            better, worse = sum(r > 1 + noise for r in ratios), sum(r < 1 - noise for r in ratios)
            lines.append((f"{what}, {mode}", better, len(ratios) - better - worse, worse))
    return lines


STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#222}.t{font-size:14px;font-weight:600}.n{fill:#111;text-anchor:middle;"
    "font-size:11px}.w{fill:#fff}.e{text-anchor:end}.o{font-weight:700}line{stroke:#888}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.n{fill:#111}.w{fill:#fff}}"
)
"""Style of all pictures. A cell of the heat map has a colour of its own, so its text has as well."""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text; `kind` is a class of `STYLE`."""
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{kind}{chr(34)}" * bool(kind)}>{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}" fill="{colour}"/>'


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A picture of these parts."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
    return "\n".join([head, f"<title>{escape(title)}</title><style>{STYLE}</style>", *parts, "</svg>\n"])


def shown(value: float) -> str:
    """Three digits of a value."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


BAR, LABELS, GAP = 17, 160, 62
"""Heights of a bar with its space, and widths of the labels and of the number behind a bar."""


def bars(
    x: float,
    y: float,
    width: float,
    values: Sequence[tuple[str, float | None]],
    most: float,
    limit: float | None = None,
) -> Iterator[str]:
    """A column of bars, each with its number. A bar that is longer than `most` is cut, and its number says so."""
    scale = (width - GAP) / most
    for row, (colour, value) in enumerate(values):
        top = y + row * BAR
        if value is not None:
            cut = value > most
            yield rectangle(x, top, max(min(value, most) * scale, 1), BAR - 5, colour)
            yield text(x + min(value, most) * scale + 4, top + 10, shown(value) + " »" * cut)
    if limit:
        place, end = x + limit * scale, y + len(values) * BAR
        yield f'<line x1="{place:.4g}" y1="{y - 3:g}" x2="{place:.4g}" y2="{end:g}" stroke-dasharray="2 3"/>'


def op_picture(name: str, op: Op, sizes: Mapping[str, str]) -> str:
    """Time and memory of an op at each of its sizes, with the least time that the machine allows."""
    providers = PEERS | OURS
    width, column, y = 800.0, (800 - LABELS) / len(GROUPS), 26.0
    parts = [text(0, 14, f"{name}, bfloat16, one {MACHINE}. A shorter bar is better.", "t")]
    panels = [
        *((mode, "ms", f"{mode}, ms") for mode in MODES),
        (MODES[1], "peak_mib", "peak memory beyond inputs, MiB"),
    ]
    for mode, key, title in panels:
        cells = {case: op.get((case, mode), {}) for case in GROUPS}
        rows = [p for p in providers if any(p in c and getattr(c[p], key) is not None for c in cells.values())]
        if not rows:
            continue
        parts.append(text(0, y + 18, title, "t"))
        y += 20
        for number, case in enumerate(GROUPS):
            x = LABELS + number * column
            parts.append(text(x, y + 18, sizes.get(case, case)))
            values = [getattr(cells[case][p], key) if p in cells[case] else None for p in rows]
            there, least = [v for v in values if v is not None], best(cells[case], OURS, key)
            if there:
                most = max(min(max(there), 4 * least[0] if least and least[0] else max(there)), 1e-6)
                limit = next((c.limit_ms for c in cells[case].values() if c.limit_ms), None) if key == "ms" else None
                colours = [providers[p][1] for p in rows]
                parts += bars(x, y + 26, column, list(zip(colours, values, strict=True)), most, limit)
        for row, provider in enumerate(rows):
            kind = "e o" if provider in OURS else "e"
            parts.append(text(LABELS - 8, y + 36 + row * BAR, providers[provider][0], kind))
        y += 34 + BAR * len(rows)
    parts.append(text(0, y + 16, "Dotted: the least time that the machine allows. »: the bar is longer than drawn."))
    return svg(width, y + 24, f"Time and memory of {name}", parts)


def end_to_end_picture(steps: Mapping[str, Mapping[str, str]]) -> str:
    """Time and peak memory of one training step, a bar for each way."""
    row = next(iter(steps.values()))
    width, left = 800.0, 180.0
    column = (width - left) / 2
    title = f"One training step of a Llama of {int(row['parameters']) / 1e9:.1f} B parameters, {row['tokens']} tokens, bfloat16"
    parts = [text(0, 14, title, "t")]
    for number, (key, unit) in enumerate((("ms", "time of a step, ms"), ("peak_gb", "peak memory, GB"))):
        values = [(WAYS[way][1], float(row[key])) for way, row in steps.items()]
        parts.append(text(left + number * column, 40, unit, "t"))
        parts += bars(left + number * column, 50, column, values, max(value for _, value in values))
    for number, way in enumerate(steps):
        parts.append(text(left - 8, 60 + number * BAR, WAYS[way][0], "e o" if way in OUR_WAYS else "e"))
    y = 66 + BAR * len(steps)
    parts.append(text(left, y, f"One {MACHINE}. A shorter bar is better."))
    return svg(width, y + 8, title, parts)


def colour_of(value: float) -> tuple[str, bool]:
    """A colour between red (a quarter or less) and blue (four or more), and whether it is dark."""
    share = max(-1.0, min(math.log(value, 4), 1.0))
    end = (11, 95, 165) if share > 0 else (178, 44, 30)
    return "#" + "".join(f"{round(238 + (part - 238) * abs(share)):02x}" for part in end), abs(share) > 0.5


def heat_map(ops: Mapping[str, Op]) -> str:
    """Op by size: the best peer's time over the best of ours."""
    left, wide, high, top = 200.0, 112.0, 32.0, 62.0
    columns = [(mode, case) for mode in MODES for case in GROUPS]
    title = "The fastest peer's time over liger's, and the peer. Above 1 (blue): liger is faster"
    parts = [text(0, 14, f"{title}.", "t")]
    for x, (mode, case) in enumerate(columns):
        parts.append(text(left + x * wide + 4, 54, case))
        if case == GROUPS[0]:
            parts.append(text(left + x * wide + 4, 38, mode, "t"))
    for y, (name, op) in enumerate(ops.items()):
        parts.append(text(left - 8, top + y * high + 19, name, "e"))
        for x, (mode, case) in enumerate(columns):
            if speedup := ratio(op, case, mode):
                colour, dark = colour_of(speedup[0])
                place, kind = (left + x * wide, top + y * high), "n w" if dark else "n"
                words = f"{speedup[0]:.2f}×" if speedup[0] < 10 else f"{speedup[0]:.0f}×"
                peer = PEERS[speedup[1]][0].replace("liger-kernel", "liger-k.")
                parts.append(rectangle(*place, wide - 3, high - 3, colour))
                parts.append(text(place[0] + wide / 2, place[1] + 13, words, kind))
                parts.append(text(place[0] + wide / 2, place[1] + 25, peer, kind))
    return svg(left + wide * len(columns), top + high * len(ops) + 4, title, parts)


class Records(NamedTuple):
    """Data of all pictures: the ops and the whole steps."""

    ops: Mapping[str, Op]
    steps: Mapping[str, Mapping[str, str]]

    @classmethod
    def of(cls, directory: Path = records.RECORDS) -> Records:
        """The records in a folder."""
        return cls(read(sources("compare", directory)), whole_steps(sources("end-to-end", directory)))

    def pictures(self) -> dict[str, str]:
        """All pictures by name."""
        drawn = {END_TO_END: end_to_end_picture(self.steps)} if self.steps else {}
        if self.ops:
            drawn[HEAT_MAP] = heat_map(self.ops)
        return drawn | {name: op_picture(name, op, sizes_of(name)) for name, op in self.ops.items()}


def sizes_of(op: str) -> dict[str, str]:
    """The numbers of an op's timed cases, by group."""
    from liger_conformance.case import cases_of

    sizes = {}
    for case in cases_of(op).cases:
        if case.group in GROUPS:
            numbers = [
                value
                for value in case.values.values()
                if isinstance(value, (int, tuple)) and not isinstance(value, bool)
            ]
            flat = [str(n) for value in numbers for n in (value if isinstance(value, tuple) else (value,))]
            sizes[case.group] = " × ".join(flat)
    return sizes


def draw(everything: Records, directory: Path = PICTURES) -> None:
    """Draw every picture, and remove those that no record has."""
    directory.mkdir(parents=True, exist_ok=True)
    pictures = everything.pictures()
    for stale in set(directory.glob("*.svg")) - {directory / f"{name}.svg" for name in pictures}:
        stale.unlink()
    for name, picture in pictures.items():
        (directory / f"{name}.svg").write_text(picture, "utf-8")


if __name__ == "__main__":
    draw(Records.of())
