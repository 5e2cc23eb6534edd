#!/usr/bin/env python3
"""Score tokens of every CausalLM type by TRL's fused head, plain and swapped, against the model's own logits: docs/trl.md.

    tools/trl_table.py                 all types, a few minutes; writes the table into the page
    tools/trl_table.py --check         the same, and fails instead of writing when the table would change
    tools/trl_table.py recurrent_gemma these types alone, and no page

Each type is built from the tiny configuration of tools/models_table.py, in float32. The truth is log_softmax of the logits that
the model returns without labels. A type that this configuration doesn't build, or that takes more than 20 seconds, isn't counted.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import models_table
import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import __version__ as trl_version
from trl.trainer.utils import add_fused_lm_head

import liger_transformers

PAGE = Path(__file__).resolve().parent.parent / "docs/trl.md"
BEGIN, END = "<!-- Written by tools/trl_table.py -->\n", "<!-- End of what tools/trl_table.py wrote -->\n"


class Row(NamedTuple):
    """What a type gave: "equal", "wrong by …" or "raises …", or in `theirs` why it was not run."""

    name: str
    theirs: str
    ours: str


SCALES = ("final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale")
"""Options of the tiny configuration that a type gets only if its own configuration has them: TRL reads them by name."""


def build(name: str) -> nn.Module:
    """The tiny model of a type."""
    own = AutoConfig.for_model(name)
    known = {key: value for key, value in models_table.TEXT.items() if key not in SCALES or hasattr(own, key)}
    return models_table.build(name, known)


def score(name: str) -> Row:
    """Both verdicts of one type."""
    try:
        signal.setitimer(signal.ITIMER_PROF, models_table.SECONDS)
        model = build(name).eval()
        ids = torch.randint(8, 99, (2, 12), generator=torch.Generator().manual_seed(1))
        swapped = copy.deepcopy(model)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        truth = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    except models_table.TooSlow:
        return Row(name, f"not run: more than {models_table.SECONDS} s", "")
    except Exception as error:
        return Row(name, f"not built: {type(error).__name__}", "")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    report = liger_transformers.apply(swapped, trl=True, strict=False)
    add_fused_lm_head(model)
    add_fused_lm_head(swapped)
    ours = _verdict(swapped, ids, truth)
    if (report.model, "fused_linear_logit_statistics(trl)") not in report.swapped:
        ours = f"left to TRL: {'; '.join(why for _, why in report.left)}"
    return Row(name, _verdict(model, ids, truth), ours)


def _verdict(model: nn.Module, ids: torch.Tensor, truth: torch.Tensor) -> str:
    try:
        with torch.no_grad():
            found = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    except Exception as error:
        return f"raises {type(error).__name__}"
    difference = float((found - truth).abs().max())
    return "equal" if difference <= 1e-4 else f"wrong by {difference:.2g}"


def table(rows: list[Row]) -> str:
    """The part of the page that is written."""
    ran = [row for row in rows if not row.theirs.startswith("not ")]
    lines = [
        f"TRL {trl_version}, transformers {transformers.__version__}: {len(ran)} of {len(rows)} CausalLM types build from one",
        "tiny configuration. Log-probabilities of `fused_lm_head=True` beside `log_softmax` of the model's own logits:",
        "",
        "| | equal | wrong | raises |",
        "|---|---|---|---|",
    ]
    for title, verdicts in (
        ("TRL's own head", [r.theirs for r in ran]),
        ("`apply(model, trl=True)`", [r.ours for r in ran]),
    ):
        counts = [sum(v.startswith(word) for v in verdicts) for word in ("equal", "wrong", "raises")]
        lines.append(f"| {title} | {' | '.join(map(str, counts))} |")
    lines += ["", "| model type | TRL's own head, in nats | `apply(model, trl=True)` |", "|---|---|---|"]
    lines += [f"| {row.name} | {row.theirs} | {row.ours} |" for row in ran if {row.theirs, row.ours} != {"equal"}]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command line."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, models_table._stop)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TYPE")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(score(name))
        print(*rows[-1], sep=" | ", flush=True)
    if not options.names:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        page = before + BEGIN + "\n" + table(rows) + "\n" + END + rest.partition(END)[2]
        if options.check and page != PAGE.read_text(encoding="utf-8"):
            print("docs/trl.md is not what this TRL gives: run tools/trl_table.py and look at the difference")
            return 1
        PAGE.write_text(page, encoding="utf-8")
    return any(row.ours.startswith(("wrong", "raises")) for row in rows)


if __name__ == "__main__":
    sys.exit(main())
