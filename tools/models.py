#!/usr/bin/env python3
"""Train every model type of transformers for one step, plain and swapped, and write docs/models.md and docs/trl.md.

    tools/models.py                  all types, about ten minutes; under an older transformers than the page's its counts alone
    tools/models.py --trl            score tokens by TRL's fused head, plain and swapped, against the model's own logits
    tools/models.py --check          the same, and fails instead of writing when a page would change
    tools/models.py llama            these types alone, and no page

Each type is built from a tiny configuration with random weights, in float32. A type that the configuration doesn't build,
or that takes more than 20 seconds, is named on the page with the reason, and nothing is claimed of it.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parent))

import pages
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import liger_transformers
from liger_core.contract import Op

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
    **dict.fromkeys([
        "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25",
        "longcat_flash", "mistral_large4", "youtu",
    ], LATENT),
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
"""Settings of a type beside or instead of TEXT; None takes a setting out."""


class NotRun(Exception):
    """Why a type was not run."""


def build(name: str, text: Mapping[str, Any] = TEXT) -> nn.Module:
    """A tiny model of the type in training mode, whose norms and logits are far from trivial."""
    torch.manual_seed(0)
    text = {key: value for key, value in {**text, **OWN.get(name, {})}.items() if value is not None}
    ways: list[tuple[Any, dict[str, Any]]] = []
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
        raise NotRun("not built: TooLarge")  # the configuration doesn't make the type small
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


@contextmanager
def limited() -> Iterator[None]:
    """Run a type that may fail, for at most `SECONDS` of processor time.

    Raises:
        NotRun: with what the page says of the type.
    """

    def stop(*_: object) -> None:
        raise NotRun(f"not run: more than {SECONDS} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    except NotRun:
        raise
    except Exception as error:  # of transformers' code for the type, which may be any
        raise NotRun(f"not built: {type(error).__name__}") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Row(NamedTuple):
    """A model type in docs/models.md: "equal", "DIFFERS …" or why it was not run; calls by op; swaps; what is left."""

    name: str
    verdict: str
    calls: Mapping[str, int] = MappingProxyType({})
    swapped: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def step(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and each parameter's gradient."""
    torch.manual_seed(2)
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(name: str) -> Row:
    """Train the type for one step both ways."""
    try:
        with limited():
            model = build(name)
            ids = torch.randint(8, 99, (2, 12), generator=torch.Generator().manual_seed(1))
            labels = ids.clone()
            labels[0, :5] = -100
            swapped = copy.deepcopy(model)
            loss, grads = step(model, ids, labels)
    except NotRun as reason:
        return Row(name, str(reason))
    report = liger_transformers.apply(swapped, strict=False)
    calls: Counter[str] = Counter()
    original = Op.__call__

    def counted(op: Op[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls[op.name] += 1
        return original(op, *args, **kwargs)

    Op.__call__ = counted  # type: ignore[method-assign]
    try:
        our_loss, our_grads = step(swapped, ids, labels)
    finally:
        Op.__call__ = original  # type: ignore[method-assign]
    limits = {key: 5e-5 * float(grad.abs().max()) + 1e-6 for key, grad in grads.items()}
    wrong = [
        k for k, atol in limits.items() if k not in our_grads or not torch.allclose(our_grads[k], grads[k], 0, atol)
    ]
    verdict = "equal"
    if not torch.allclose(loss, our_loss, rtol=1e-5, atol=1e-6) or grads.keys() != our_grads.keys() or wrong:
        verdict = f"DIFFERS: loss {float(loss):.6f} and {float(our_loss):.6f}; {', '.join(wrong[:3])}"
    swaps = (sorted({f"{module}: {reason}" for module, reason in pairs}) for pairs in (report.swapped, report.left))
    return Row(name, verdict, calls, *map(tuple, swaps))


NORM = re.compile(r"rms_norm\(offset=(\S+), casting_mode='(\w+)'\)")
COUNTS = re.compile(r"^\| (\d+\.\d+\.\d+) \| \d+ \|.*$", re.M)
"""The counts of one transformers."""


def line(row: Row) -> str:
    """The line of a type in the page's second table."""
    ops = {swap.partition(": ")[2] for swap in row.swapped}
    calls = Counter(row.calls)
    cells = [
        row.name if row.verdict == "equal" else f"{row.name}: {row.verdict}",
        ", ".join(sorted(NORM.sub(r"rms \1 \2", op) for op in ops if "norm" in op)),
        calls["rms_norm"] + calls["layer_norm"] or "",
        calls["rope"] + calls["qwen2vl_mrope"] + calls["llama4_rope"] or "",
        calls["swiglu"] + calls["geglu"] + calls["relu_squared"] or "",
        "fused" if calls["fused_linear_cross_entropy"] else "dense",
        "; ".join(row.left),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def models_page(rows: list[Row]) -> dict[str, str]:
    """The blocks of docs/models.md. Other versions of transformers keep their counts; the newest has the rest of the page."""
    ran = [row for row in rows if not row.verdict.startswith("not ")]
    equal = [row for row in ran if row.verdict == "equal"]
    dense = [row.name for row in equal if not row.calls.get("fused_linear_cross_entropy")]
    fused = f"{len(equal) - len(dense)}{', all but ' + ', '.join(dense) if dense else ''}"
    now = transformers.__version__
    counts = {match[1]: match[0] for match in COUNTS.finditer((pages.ROOT / "docs/models.md").read_text("utf-8"))}
    counts[now] = f"| {now} | {len(rows)} | {len(ran)} | {len(equal)} | {fused} |"
    heads = ("transformers", "types", "built and run", "loss and every gradient equal", "loss fused")
    newest_first = sorted(counts, key=Version, reverse=True)
    blocks = {"model-counts": pages.table(heads, ()) + "".join(f"{counts[version]}\n" for version in newest_first)}
    if now != newest_first[0]:
        return blocks
    heads = ("model type", "norms", "norm calls", "rope", "activations", "loss", "left as it is")
    blocks["model-types"] = (
        f"The rest of this page is about {now}.\n\n" + pages.table(heads, ()) + "".join(f"{line(row)}\n" for row in ran)
    )
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict.startswith("not "):
            reasons.setdefault(row.verdict, []).append(row.name)
    blocks["models-not-run"] = "".join(f"- {reason}: {', '.join(names)}\n" for reason, names in sorted(reasons.items()))
    return blocks


class Scores(NamedTuple):
    """A model type in docs/trl.md: "equal", "wrong by …", "raises …" or, in `theirs`, why it was not run."""

    name: str
    theirs: str
    ours: str = ""

    @property
    def verdict(self) -> str:
        return f"{self.theirs} | {self.ours}"


SCALES = ("final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale")
"""Options of the tiny configuration that a type gets only if its own configuration has them: TRL reads them by name."""


def score(name: str) -> Scores:
    """Both log-probabilities of one type, beside log_softmax of the logits that the model returns without labels."""
    from trl.trainer.utils import add_fused_lm_head

    try:
        with limited(), torch.no_grad():
            defaults = AutoConfig.for_model(name)
            known = {key: value for key, value in TEXT.items() if key not in SCALES or hasattr(defaults, key)}
            model = build(name, known).eval()
            ids = torch.randint(8, 99, (2, 12), generator=torch.Generator().manual_seed(1))
            swapped = copy.deepcopy(model)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            truth = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    except NotRun as reason:
        return Scores(name, str(reason))
    report = liger_transformers.apply(swapped, trl=True, strict=False)
    add_fused_lm_head(model)
    add_fused_lm_head(swapped)
    ours = _scored(swapped, ids, truth)
    if (report.model, "fused_linear_logit_statistics(trl)") not in report.swapped:
        ours = f"left to TRL: {'; '.join(why for _, why in report.left)}"
    return Scores(name, _scored(model, ids, truth), ours)


def _scored(model: nn.Module, ids: torch.Tensor, truth: torch.Tensor) -> str:
    try:
        with torch.no_grad():
            logps = model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
    except Exception as error:  # of TRL's head on this type, which may be any
        return f"raises {type(error).__name__}"
    difference = float((logps - truth).abs().max())
    return "equal" if difference <= 1e-4 else f"wrong by {difference:.2g}"


def trl_page(rows: list[Scores]) -> dict[str, str]:
    """The block of docs/trl.md."""
    from trl import __version__ as trl_version

    ran = [row for row in rows if not row.theirs.startswith("not ")]
    counts = [
        (title, *(sum(verdict.startswith(word) for verdict in verdicts) for word in ("equal", "wrong", "raises")))
        for title, verdicts in (
            ("TRL's own head", [row.theirs for row in ran]),
            ("`apply(model, trl=True)`", [row.ours for row in ran]),
        )
    ]
    heads = ("model type", "TRL's own head, in nats", "`apply(model, trl=True)`")
    text = f"TRL {trl_version}, transformers {transformers.__version__}: {len(ran)} of {len(rows)} CausalLM types build from one"
    text += "\ntiny configuration. Log-probabilities of `fused_lm_head=True` beside `log_softmax` of the model's own logits:\n\n"
    text += pages.table(("", "equal", "wrong", "raises"), counts)
    return {"trl": f"{text}\n" + pages.table(heads, (row for row in ran if {row.theirs, row.ours} != {"equal"}))}


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TYPE")
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    causal, others = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}, {*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    run: Callable[[str], Row | Scores] = score if options.trl else compare
    page: Callable[[Any], dict[str, str]] = trl_page if options.trl else models_page
    rows = []
    for name in options.names or sorted(causal if options.trl else causal | others):
        rows.append(run(name))
        print(f"{name}: {rows[-1].verdict}", flush=True)
    if not options.names:
        blocks = {block: lambda text=text: text for block, text in page(rows).items()}
        stale = pages.write(blocks, check=options.check)
        if options.check and stale:
            print(f"stale: {', '.join(stale)}: run tools/models.py and look at the difference")
            return 1
    return any(word in row.verdict for row in rows for word in ("DIFFERS", "| wrong", "| raises"))


if __name__ == "__main__":
    sys.exit(main())
