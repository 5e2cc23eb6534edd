"""Tiny models of many architectures with random weights, batches for them, and their losses and gradients compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

VOCABULARY = 99
IMAGE = 7
"""The token that stands for a piece of an image."""

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}

TEXT_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": MOE,
    "qwen3_next": {
        **MOE,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mixtral": MOE,
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi3": {"original_max_position_embeddings": 64},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoe": {**MOE, "logits_scaling": 3.0},
    "olmo2": {},
    "olmo3": {},
    "olmoe": MOE,
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "smollm3": {},
    "cohere2": {"logit_scale": 0.25},
    "exaone4": {},
    "starcoder2": {},
    "gpt_oss": MOE,
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 8,
        "logits_soft_cap": 3.0,
        "block_types": ["recurrent", "attention"],
    },
    "hunyuan_v1_dense": {},
    "seed_oss": {"residual_dropout": 0.0},
    "nemotron": {},
    "nanochat": {},
    "bitnet": {},
    "ernie4_5": {},
    "llama4_text": {**MOE, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
    "gpt_neox": {},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "lm_head_multiplier": 0.5,
    },
    "bart": {
        "head_dim": None,
        "d_model": 32,
        "decoder_layers": 2,
        "encoder_layers": 2,
        "decoder_ffn_dim": 48,
        "encoder_ffn_dim": 48,
        "decoder_attention_heads": 4,
        "encoder_attention_heads": 4,
        "dropout": 0.0,
    },
}
IMAGE_MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
    "qwen2_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        "image_token_id": IMAGE,
    },
    "qwen2_5_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [0]},
        "image_token_id": IMAGE,
    },
    "qwen3_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": {**QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        "image_token_id": IMAGE,
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
    },
    "paligemma": {
        "text_config": {"model_type": "gemma", **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **VISION, "projection_dim": 32},
        "image_token_index": IMAGE,
        "projection_dim": 32,
    },
}


def build(name: str, **options: Any) -> PreTrainedModel:
    """A model in float32 and in training mode, whose norms, biases and logits are far from trivial."""
    torch.manual_seed(0)
    if name in IMAGE_MODELS:
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **IMAGE_MODELS[name]))
    else:
        settings = {**TEXT, **TEXT_MODELS[name], **options}
        settings = {key: value for key, value in settings.items() if value is not None}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **settings))
    return shaken(model)


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """The model with noise on every parameter, in training mode."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def skip_unknown(name: str) -> None:
    """Skip the test where this transformers has no such architecture."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def batch(name: str = "llama") -> dict[str, Any]:
    """Two rows of tokens, the first with five labels that don't count, and images for a model that takes them."""
    torch.manual_seed(1)
    ids = torch.randint(8, VOCABULARY, (2, 12))
    labels = ids.clone()
    labels[0, :5] = -100
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "use_cache": False}
    if name in ("llava", "paligemma", "gemma3"):
        ids[:, 1:5] = IMAGE
        inputs["pixel_values"] = torch.randn(2, 3, 8, 8)
    if name in ("gemma3", "paligemma"):
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        ids[:, 1:5] = IMAGE
        inputs["pixel_values"] = torch.randn(2 * 16, 3 * 2 * 4 * 4)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


Gradients = dict[str, Tensor]


def run(model: nn.Module, inputs: dict[str, Any], **more: Any) -> tuple[Any, Gradients]:
    """The output, and the gradient of its loss for every parameter that has one."""
    model.zero_grad()
    output = model(**inputs, **more)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(want: tuple[Any, Gradients], got: tuple[Any, Gradients], rtol: float = 2e-5) -> None:
    """Both losses are equal, and every gradient to `rtol` of its largest entry."""
    torch.testing.assert_close(got[0].loss, want[0].loss, rtol=1e-5, atol=1e-6)
    assert want[1].keys() == got[1].keys()
    for name, gradient in want[1].items():
        difference = float((gradient - got[1][name]).abs().max())
        assert difference <= rtol * (float(gradient.abs().max()) + 1e-6) + 1e-7, f"{name} differs by {difference}"


def classes(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    return [type(module) for module in modules]
