#!/usr/bin/env python3
"""Train every model type of transformers for one step, plain and swapped, and write down what was swapped: docs/models.md.

    tools/models_table.py                        all types, about ten minutes; writes the page, or under an older transformers
                                                 than the page's its counts alone
    tools/models_table.py --check                the same, and fails instead of writing when the page would change
    tools/models_table.py --rows FILE            the first, and keeps what each type gave; those that FILE has aren't run again
    tools/models_table.py --rows FILE llama      these types alone, and no page

Each type is built from a tiny configuration with random weights, in float32. A type that the configuration doesn't build,
or that takes more than 20 seconds, is named on the page with the reason, and nothing is claimed of it.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import re
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import liger_transformers
from liger_core.contract import Op

PAGE = Path(__file__).resolve().parent.parent / "docs/models.md"
SECONDS = 20

TEXT: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout": 0.0,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "final_logit_softcapping": 3.0, "logits_soft_cap": 3.0, "logits_scaling": 3.0, "logit_scale": 0.25,
    "sliding_window": 8, "is_decoder": True, "use_cache": False, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_chunk_size": 8, "state_size": 8, "lru_width": 32,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_heads": 4, "depth": 1,
    "image_size": 8, "patch_size": 4, "out_hidden_size": 32, "embed_dim": 32, "projection_dim": 32,
}  # fmt: skip


LATENT: dict[str, Any] = {"num_key_value_heads": 4}
PLANES: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
}
MAMBA_2: dict[str, Any] = {"num_heads": 8, "n_groups": 1, "chunk_size": 8}
PER_LAYER: dict[str, Any] = {"vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25",
            "longcat_flash", "mistral_large4", "youtu",
        ],
        LATENT,
    ),
    **dict.fromkeys(["cosmos3_edge", "glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_vl", "qwen2_vl"], PLANES),
    **dict.fromkeys(["qwen3_5", "qwen3_5_moe"], LINEAR),
    **dict.fromkeys(["gemma4", "gemma4_text", "gemma4_unified"], PER_LAYER),
    "codegen": {"rotary_dim": 4},
    "dots1": {"first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0},
    "dots3_note_text": LATENT,
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_expand": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 99},
    "glm4v_moe": {"rope_parameters": {**PLANES["rope_parameters"], "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_vl": PLANES,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "use_expert_bias": True},
    "mamba2": MAMBA_2,
    "minicpm3": {"logits_scaling": None, **LATENT},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "xlstm": {"v_head_dim": None},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a type has beside or instead of TEXT; None takes a setting out."""


class Row(NamedTuple):
    """What one model type gave."""

    name: str
    verdict: str
    calls: dict[str, int]
    swapped: list[str]
    left: list[str]


class TooSlow(Exception):
    """A type has had its time."""


class TooLarge(Exception):
    """The configuration doesn't make the type small."""


def build(name: str, text: dict[str, Any] = TEXT) -> nn.Module:
    """A tiny model of the type in training mode, whose norms and logits are far from trivial."""
    torch.manual_seed(0)
    text = {key: value for key, value in {**text, **OWN.get(name, {})}.items() if value is not None}
    ways = []
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        ways.append((AutoModelForCausalLM, text))
    if name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        ways.append((AutoModelForImageTextToText, {"text_config": dict(text), "vision_config": dict(VISION)}))
    for auto, settings in ways:
        config = AutoConfig.for_model(name, **settings)
        with torch.device("meta"):
            size = sum(p.numel() for p in auto.from_config(copy.deepcopy(config)).parameters())
        if size <= 2**24:
            break
    else:
        raise TooLarge
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def step(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and each parameter's gradient."""
    torch.manual_seed(2)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(name: str) -> Row:
    """Train the type for one step both ways."""
    calls: Counter[str] = Counter()
    original = Op.__call__

    def counted(op: Op[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls[op.name] += 1
        return original(op, *args, **kwargs)

    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        model = build(name)
        ids = torch.randint(8, 99, (2, 12), generator=torch.Generator().manual_seed(1))
        labels = ids.clone()
        labels[0, :5] = -100
        swapped = copy.deepcopy(model)
        loss, want = step(model, ids, labels)
    except TooSlow:
        return Row(name, f"not run: more than {SECONDS} s", {}, [], [])
    except Exception as error:
        return Row(name, f"not built: {type(error).__name__}", {}, [], [])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    report = liger_transformers.apply(swapped, strict=False)
    Op.__call__ = counted  # type: ignore[method-assign]
    try:
        our_loss, got = step(swapped, ids, labels)
    finally:
        Op.__call__ = original  # type: ignore[method-assign]
    wrong = [key for key in want if key not in got or not _close(want[key], got[key])]
    if not torch.allclose(loss, our_loss, rtol=1e-5, atol=1e-6) or want.keys() != got.keys() or wrong:
        verdict = f"DIFFERS: loss {float(loss):.6f} and {float(our_loss):.6f}; {', '.join(wrong[:3])}"
    else:
        verdict = "equal"
    return Row(
        name,
        verdict,
        dict(calls),
        sorted({f"{what}: {op}" for what, op in report.swapped}),
        sorted({f"{what}: {why}" for what, why in report.left}),
    )


def _close(want: torch.Tensor, got: torch.Tensor) -> bool:
    return float((want - got).abs().max()) <= 5e-5 * float(want.abs().max()) + 1e-6


def norms(row: Row) -> str:
    """The norms' options, without the classes."""
    ops = {line.partition(": ")[2] for line in row.swapped}
    return ", ".join(sorted(NORM.sub(r"rms \1 \2", op) for op in ops if "norm" in op))


NORM = re.compile(r"rms_norm\(offset=(\S+), casting_mode='(\w+)'\)")
COUNTS = re.compile(r"^\| (\d+\.\d+\.\d+) \| \d+ \|.*$", re.M)
"""The counts of one transformers."""


def counts(rows: list[Row]) -> str:
    """The line of this transformers in the page's first table."""
    ran = [row for row in rows if not row.verdict.startswith("not ")]
    equal = [row for row in ran if row.verdict == "equal"]
    dense = [row.name for row in equal if not row.calls.get("fused_linear_cross_entropy")]
    fused = f"{len(equal) - len(dense)}{', all but ' + ', '.join(dense) if dense else ''}"
    return f"| {transformers.__version__} | {len(rows)} | {len(ran)} | {len(equal)} | {fused} |"


def page(rows: list[Row], before: str) -> str:
    """The page, with what `before` says of other versions of transformers; of an older one its line alone changes."""
    lines = {match[1]: match[0] for match in COUNTS.finditer(before)}
    lines[transformers.__version__] = counts(rows)
    newest = max(lines, key=_order)
    table = "\n".join(lines[version] for version in sorted(lines, key=_order, reverse=True))
    if newest == transformers.__version__:
        return _page(rows, table)
    matches = [*COUNTS.finditer(before)]
    return before[: matches[0].start()] + table + before[matches[-1].end() :]


def _order(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def line(row: Row) -> str:
    """The line of a type in the page's second table."""
    calls = Counter(row.calls)
    cells = [
        row.name if row.verdict == "equal" else f"{row.name}: {row.verdict}",
        norms(row),
        calls["rms_norm"] + calls["layer_norm"] or "",
        calls["rope"] + calls["qwen2vl_mrope"] + calls["llama4_rope"] or "",
        calls["swiglu"] + calls["geglu"] + calls["relu_squared"] or "",
        "fused" if calls["fused_linear_cross_entropy"] else "dense",
        "; ".join(row.left),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _page(rows: list[Row], table: str) -> str:
    ran = [row for row in rows if not row.verdict.startswith("not ")]
    lines = [
        "<!-- Written by tools/models_table.py -->", "", "# Models", "",
        "For whoever asks whether a Hugging Face model type runs on liger_core's ops, and which of its parts do.", "",
        "`tools/models_table.py` built every CausalLM and ImageTextToText type of transformers from a tiny configuration, and",
        "trained it for one step, plain and swapped, in float32 on a CPU. The counts, and the type whose logits are made:", "",
        "| transformers | types | built and run | loss and every gradient equal | loss fused |", "|---|---|---|---|---|",
        table, "",
        f"The rest of this page is about {transformers.__version__}. A number is how often a step called the op.",
        "`rms 1 gemma` is `rms_norm(offset=1, casting_mode='gemma')`. `apply(model, experts=True)` was not asked for.", "",
        "| model type | norms | norm calls | rope | activations | loss | left as it is |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += map(line, ran)
    lines += [
        "",
        "## Not run",
        "",
        "These configurations don't fit these types; most have no `labels`, or sizes of their own.",
        "",
    ]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict.startswith("not "):
            reasons.setdefault(row.verdict, []).append(row.name)
    lines += [f"- {reason}: {', '.join(names)}" for reason, names in sorted(reasons.items())]
    return "\n".join(lines) + "\n"


def _stop(*_: Any) -> None:
    raise TooSlow


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _stop)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TYPE")
    parser.add_argument("--rows", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    every = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
    kept = options.rows.read_text(encoding="utf-8").splitlines() if options.rows and options.rows.exists() else []
    known = {row.name: row for row in (Row(*json.loads(line)) for line in kept)}
    rows = []
    for name in options.names or every:
        if name not in known:
            known[name] = compare(name)
            print(*known[name][:3], flush=True)
            if options.rows:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[name]) + "\n")
        rows.append(known[name])
    before = PAGE.read_text(encoding="utf-8")
    if options.check and page(rows, before) != before:
        print(
            "docs/models.md is not what this transformers gives: run tools/models_table.py and look at the difference"
        )
        return 1
    if not options.names and not options.check:
        PAGE.write_text(page(rows, before), encoding="utf-8")
    return any(row.verdict.startswith("DIFFERS") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
