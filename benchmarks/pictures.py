"""Pictures of what was measured, drawn from the records of `compare.py`, `end_to_end.py` and `losses.py` and from nothing else.

    python benchmarks/pictures.py                    docs/pictures/*.png
    python benchmarks/pictures.py --page FILE.html   the same as one interactive page, which needs plotly and no network

A picture holds a digest of the records and of this file. A test compares it, so that it fails when a picture is stale.
"""

from __future__ import annotations

import argparse
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = Path(__file__).parent.parent / "docs/pictures"
HEAT_MAP = "best-peer"
END_TO_END = "end-to-end"
MODEL = "llama-1b"
"""The model of `end_to_end.py` whose step is drawn."""
LENGTHS = "memory-over-length"

GROUPS = ("small", "medium", "large")
MODES = ("forward", "forward+backward")

OURS = {"ours-triton": "#0b5fa5", "ours-cutile": "#2a9d5c"}
PEERS = {
    "eager": "#9a9a9a",
    "compile": "#e08214",
    "grouped": "#b35806",
    "liger": "#c0392b",
    "liger-cutile": "#e98074",
    "liger-cutedsl": "#8e44ad",
    "quack": "#b8860b",
}
LIMIT = "limit"

LIMITS = {"NVIDIA H200": (4250.0, 790.0)}
"""Best rates of a machine: GB/s of a large copy, read and written, and TFLOP/s of a bfloat16 product of 8192 × 8192
matrices. Both were measured there by PyTorch 2.11."""


WAYS = {
    "plain": ("PyTorch", PEERS["eager"]),
    "compile": ("torch.compile", PEERS["compile"]),
    "liger": ("liger-kernel 0.8.5", PEERS["liger"]),
    "triton": ("liger", OURS["ours-triton"]),
    "cutile": ("liger, cuTile", OURS["ours-cutile"]),
    "triton-compile": ("liger, torch.compile", "#6aaed6"),
    "triton-lean": ("liger, lean", "#08306b"),
    "triton-lean-compile": ("liger, lean, torch.compile", "#4292c6"),
}
"""The ways of `end_to_end.py`, from top to bottom, as a reader of a picture knows them."""


class Cell(NamedTuple):
    """Result of one provider in one case and mode."""

    ms: float
    peak_mib: float | None
    limit_ms: float | None


Op = dict[tuple[str, str], dict[str, Cell]]
"""The cells of an op by case and mode, then by provider."""


def sources(kind: str, directory: Path) -> list[Path]:
    """The records of a kind, the newest measurement of an op last."""
    paths = directory.glob(f"*-{kind}-*.csv")
    # A run of a few ops is a second look at them, so it comes after the run of all ops of that day.
    return sorted(paths, key=lambda path: (path.name[:10], -len(ops_in(records.read_csv(path)[1])), path.name))


def ops_in(rows: Sequence[Mapping[str, str]]) -> set[str]:
    """The ops that a record has."""
    return {row["op"] for row in rows if "op" in row}


def read(paths: Sequence[Path]) -> dict[str, Op]:
    """The last measurement of every op."""
    ops: dict[str, Op] = {}
    for path in paths:
        head, rows = records.read_csv(path)
        chip = head["machine"].split(",")[0]
        for op in ops_in(rows):
            ops[op] = {}
        for row in rows:
            if row["ms"] and row["case"] in GROUPS:
                cells = ops[row["op"]].setdefault((row["case"], row["mode"]), {})
                cells[row["provider"]] = _cell(row, chip)
    return dict(sorted(ops.items()))


def _cell(row: Mapping[str, str], chip: str) -> Cell:
    ms = float(row["ms"])
    copies, products = LIMITS.get(chip, (None, None))
    limit = None
    if row["tflops"] and products:
        limit = ms * float(row["tflops"]) / products
    elif row["gbps"] and copies:
        limit = ms * float(row["gbps"]) / copies
    # The axis is logarithmic: a peer that writes over its inputs takes 0.
    return Cell(ms, max(float(row["peak_mib"]), 1.0) if row["peak_mib"] else None, limit)


def whole_steps(paths: Sequence[Path]) -> dict[str, Mapping[str, str]]:
    """The rows of a whole step of `MODEL`, by way; of two of one way, the later."""
    rows = [row for path in paths for row in records.read_csv(path)[1] if row["ms"] and not row["checkpointing"]]
    by_way = {row["way"]: row for row in rows if row["model"] == MODEL}
    return {way: by_way[way] for way in WAYS if way in by_way}


def lengths(path: Path) -> list[Mapping[str, str]]:
    """The rows of a record of `losses.py` that have a loss's memory by the length of its two sequences."""
    return [row for row in records.read_csv(path)[1] if row["subject"] == "length" and row["peak_mib"]]


def made_of(path: Path) -> str | None:
    """The digest that a picture holds; None if there is no picture."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as picture:
        return picture.info.get("Digest")


def best(cells: Mapping[str, Cell], providers: Sequence[str]) -> tuple[float, str] | None:
    """The shortest time among some providers, and whose it is."""
    return min(((cells[name].ms, name) for name in providers if name in cells), default=None)


def ratio(op: Op, case: str, mode: str) -> tuple[float, str] | None:
    """The best peer's time over the best of ours, and the peer's name: above 1, ours is faster."""
    cells = op.get((case, mode), {})
    ours, peer = best(cells, list(OURS)), best(cells, list(PEERS))
    return (peer[0] / ours[0], peer[1]) if ours and peer else None


def heat_map(ops: Mapping[str, Op]) -> Figure:
    """Op by size: the best peer's time over the best of ours."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    columns = [(case, mode) for mode in MODES for case in GROUPS]
    figure = Figure(figsize=(11, 0.36 * len(ops) + 1.6), layout="constrained")
    axes = figure.subplots()
    norm, colours = LogNorm(1 / 4, 4), colormaps["RdBu"]
    for y, op in enumerate(ops.values()):
        for x, (case, mode) in enumerate(columns):
            speedup = ratio(op, case, mode)
            shade = norm(min(max(speedup[0], 1 / 4), 4)) if speedup else 0.5
            axes.add_patch(_square(x, y, colours(shade)))
            if speedup:
                dark = abs(shade - 0.5) > 0.33
                text = f"{speedup[0]:.2f}× {speedup[1]}" if speedup[0] < 10 else f"{speedup[0]:.0f}× {speedup[1]}"
                axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color="white" if dark else "black")
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(ops) - 0.5, -0.5))
    axes.set_xticks(range(len(columns)), [f"{case}\n{mode}" for case, mode in columns], fontsize=8)
    axes.set_yticks(range(len(ops)), list(ops), fontsize=8)
    axes.tick_params(length=0, labeltop=True, labelbottom=False, top=False)
    axes.set_title("The best peer's time over ours: blue, ours is faster", fontsize=11, pad=12)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def end_to_end_picture(steps: Mapping[str, Mapping[str, str]]) -> Figure:
    """Time and peak memory of one training step, a bar for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.5 * len(steps) + 1.3), layout="constrained")
    names, colours = zip(*(WAYS[way] for way in steps), strict=True)
    panels = figure.subplots(1, 2, sharey=True)
    panels[0].invert_yaxis()
    for axes, key, unit in zip(panels, ("ms", "peak_gb"), ("ms", "GB"), strict=True):
        values = [float(row[key]) for row in steps.values()]
        bars = axes.barh(range(len(steps)), values, color=colours, height=0.65)
        axes.bar_label(bars, [f"{value:.0f} ms" if unit == "ms" else f"{value:.1f} GB" for value in values], padding=4)
        axes.set_xlim(0, max(values) * 1.2)
        axes.set_yticks(range(len(steps)), names)
        axes.tick_params(left=False)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.set_title("time of a step" if unit == "ms" else "peak memory", fontsize=10)
    row = next(iter(steps.values()))
    billions = int(row["parameters"]) / 1e9
    figure.suptitle(
        f"One training step of a Llama of {billions:.1f} B parameters, {row['tokens']} tokens, bfloat16", fontsize=11
    )
    return figure


def lengths_picture(rows: Sequence[Mapping[str, str]]) -> Figure:
    """Peak memory of a loss over the length of its sequences, a line for each provider that has two lengths or more."""
    from matplotlib.figure import Figure

    losses = list(dict.fromkeys(row["mode"] for row in rows))
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axes, loss in zip(figure.subplots(1, len(losses), sharey=True, squeeze=False)[0], losses, strict=True):
        for provider, colour in (PEERS | {"cce": "#16a085"} | OURS).items():
            mine = [row for row in rows if row["mode"] == loss and row["provider"] == provider]
            points = sorted((int(row["rows"]) // 2, max(float(row["peak_mib"]), 1.0) / 1024) for row in mine)
            ours = provider in OURS
            if points:
                x, y = zip(*points, strict=True)
                style = {"linewidth": 2.4 if ours else 1.2, "zorder": 3 if ours else 2, "markersize": 6 if ours else 4}
                axes.plot(x, y, marker="o", color=colour, label=provider, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({int(row["rows"]) // 2 for row in rows})
        axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(visible=True, which="major", axis="y", color="#dddddd", linewidth=0.6)
        axes.set_title(loss.upper(), fontsize=10)
        axes.set_xlabel("tokens of each of two sequences")
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"Peak memory beyond inputs, GiB: a head of {rows[0]['vocabulary']} × {rows[0]['hidden']}, forward and backward",
        fontsize=11,
    )
    return figure


def _square(x: int, y: int, colour: object) -> object:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour)


def op_picture(name: str, op: Op) -> Figure:
    """Time and memory of an op over size, with the least time that the machine allows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, mode in zip(panels, MODES, strict=False):
        _lines(axes, op, mode, "ms")
        axes.set_title(f"{mode}, ms", fontsize=10)
    _lines(panels[2], op, MODES[1], "peak_mib")
    panels[2].set_title("peak memory beyond inputs, MiB", fontsize=10)
    handles = {
        line.get_label(): line
        for axes in panels
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False
    )
    figure.suptitle(name, fontsize=12)
    return figure


def _lines(axes: Axes, op: Op, mode: str, key: str) -> None:
    for provider, colour in (PEERS | OURS).items():
        values = [_value(op, case, mode, provider, key) for case in GROUPS]
        if any(values):
            ours = provider in OURS
            style = {"linewidth": 2.4 if ours else 1.2, "zorder": 3 if ours else 2, "markersize": 6 if ours else 4}
            axes.plot(range(3), [v or float("nan") for v in values], marker="o", color=colour, label=provider, **style)
    if key == "ms":
        limits = [limit(op, case, mode) for case in GROUPS]
        if any(limits):
            axes.plot(range(3), [v or float("nan") for v in limits], color="black", linestyle=":", label=LIMIT)
    axes.set_yscale("log" if any(line.get_ydata().size for line in axes.get_lines()) else "linear")
    axes.set_xticks(range(3), GROUPS)
    axes.set_xlim(-0.2, 2.2)
    axes.grid(visible=True, which="major", axis="y", color="#dddddd", linewidth=0.6)


def _value(op: Op, case: str, mode: str, provider: str, key: str) -> float | None:
    cell = op.get((case, mode), {}).get(provider)
    return getattr(cell, key) if cell else None


def limit(op: Op, case: str, mode: str) -> float | None:
    """The least time that the machine allows: what has to move or to be multiplied, at the best rate measured there."""
    return next((cell.limit_ms for cell in op.get((case, mode), {}).values() if cell.limit_ms), None)


class Records(NamedTuple):
    """Data of all pictures: the ops, the whole steps, losses by length, and the files that these were read from."""

    ops: Mapping[str, Op]
    steps: Mapping[str, Mapping[str, str]]
    lengths: Sequence[Mapping[str, str]]
    paths: Sequence[Path]

    @classmethod
    def of(cls, directory: Path = records.RECORDS) -> Records:
        """The records in a folder."""
        compared, steps = sources("compare", directory), sources("end-to-end", directory)
        # Only the newest: it says itself beside whom it was measured. Most records of losses have no lengths.
        curves = [path for path in sorted(directory.glob("*-losses-*.csv")) if lengths(path)][-1:]
        length_rows = [row for path in curves for row in lengths(path)]
        return cls(read(compared), whole_steps(steps), length_rows, [*compared, *steps, *curves])

    @property
    def names(self) -> list[str]:
        """The pictures, without their suffix."""
        return [
            *[END_TO_END] * bool(self.steps),
            *[LENGTHS] * bool(self.lengths),
            *[HEAT_MAP] * bool(self.ops),
            *self.ops,
        ]

    @property
    def digest(self) -> str:
        """Hash of everything that a picture depends on: the records and this file."""
        summed = hashlib.sha256(Path(__file__).read_bytes())
        for path in self.paths:
            summed.update(path.name.encode())
            summed.update(path.read_bytes())
        return summed.hexdigest()

    def picture(self, name: str) -> Figure:
        """Picture with a name in `names`."""
        if name == END_TO_END:
            return end_to_end_picture(self.steps)
        if name == LENGTHS:
            return lengths_picture(self.lengths)
        return heat_map(self.ops) if name == HEAT_MAP else op_picture(name, self.ops[name])


def draw(everything: Records, directory: Path = PICTURES) -> None:
    """Draw every picture, and remove those that no record has."""
    directory.mkdir(parents=True, exist_ok=True)
    for stale in set(directory.glob("*.png")) - {directory / f"{name}.png" for name in everything.names}:
        stale.unlink()
    from PIL import Image, PngImagePlugin

    info = PngImagePlugin.PngInfo()
    info.add_text("Digest", everything.digest)
    for name in everything.names:
        figure = everything.picture(name)
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=90)
        # A palette is enough for lines and text, and takes a third of the bytes.
        with Image.open(drawn) as picture:
            picture.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE).save(
                directory / f"{name}.png", optimize=True, pnginfo=info
            )


def page(everything: Records) -> str:
    """A self-contained page of all records of ops: an op is chosen from a list, a provider by a click on its name."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    ops, heads = everything.ops, [records.read_csv(path)[0] for path in everything.paths]
    shown = [*((mode, "ms") for mode in MODES), (MODES[1], "peak_mib")]
    figure = make_subplots(
        rows=1, cols=3, subplot_titles=[*(f"{m}, ms" for m in MODES), "peak memory beyond inputs, MiB"]
    )
    owners: list[str] = []
    for name, op in ops.items():
        for provider, colour in (PEERS | OURS | {LIMIT: "black"}).items():
            for column, (mode, key) in enumerate(shown, 1):
                if provider == LIMIT:
                    values = [limit(op, case, mode) if key == "ms" else None for case in GROUPS]
                else:
                    values = [_value(op, case, mode, provider, key) for case in GROUPS]
                line = {"color": colour, "width": 3 if provider in OURS else 1.5}
                if provider == LIMIT:
                    line["dash"] = "dot"
                trace = go.Scatter(
                    x=GROUPS,
                    y=values,
                    name=provider,
                    legendgroup=provider,
                    showlegend=column == 1,
                    line=line,
                    mode="lines+markers",
                    visible=name == next(iter(ops)),
                )
                figure.add_trace(trace, row=1, col=column)
                owners.append(name)
    buttons = [
        {"label": name, "method": "update", "args": [{"visible": [o == name for o in owners]}, {"title.text": name}]}
        for name in ops
    ]
    machines = "; ".join(dict.fromkeys(head["machine"].split(",")[0] for head in heads))
    versions = ", ".join(dict.fromkeys(name for head in heads for name in head["versions"].split(", ")))
    figure.update_yaxes(type="log")
    figure.update_layout(
        title={"text": next(iter(ops)), "x": 0.5},
        updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.3}],
        template="plotly_white",
        margin={"t": 150},
        height=620,
    )
    html = figure.to_html(full_html=True, include_plotlyjs=True, config={"displaylogo": False})
    note = f"<p style='font: 14px sans-serif; margin: 1em 2em'>Measured on {machines}: {versions}.</p>"
    return html.replace("<body>", f"<body>{note}", 1)


def main(words: Sequence[str] | None = None) -> None:
    """Draw the pictures, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, metavar="FILE.html", help="write one interactive page, and no pictures")
    options = parser.parse_args(words)
    everything = Records.of()
    if options.page:
        options.page.write_text(page(everything), encoding="utf-8")
    else:
        draw(everything)


if __name__ == "__main__":
    main()
