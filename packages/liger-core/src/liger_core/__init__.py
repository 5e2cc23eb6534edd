"""Operators for training language models: one contract per op, one kernel per language."""

from typing import TYPE_CHECKING

from liger_core import losses
from liger_core.backend import BackendInfo, Unsupported, backends
from liger_core.devices import infer_device
from liger_core.dispatch import use
from liger_core.explanation import explain, get_current_backend, list_overridden_ops
from liger_core.op import get_op
from liger_core.ops.attn_res import attn_res
from liger_core.ops.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_core.ops.distillation import DistillationOutput, distillation
from liger_core.ops.dyt import dyt
from liger_core.ops.embedding import embedding
from liger_core.ops.fused_add_rms_norm import fused_add_rms_norm
from liger_core.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_core.ops.fused_linear_distillation import fused_linear_distillation
from liger_core.ops.fused_linear_jsd import fused_linear_jsd
from liger_core.ops.fused_linear_kl_div import fused_linear_kl_div
from liger_core.ops.fused_linear_logit_statistics import fused_linear_logit_statistics
from liger_core.ops.fused_moe import fused_moe
from liger_core.ops.fused_neighborhood_attention import fused_neighborhood_attention
from liger_core.ops.gated_mlp import gated_mlp
from liger_core.ops.geglu import geglu
from liger_core.ops.group_norm import group_norm
from liger_core.ops.grpo_loss import GRPOOutput, grpo_loss
from liger_core.ops.jsd import jsd
from liger_core.ops.kl_div import kl_div
from liger_core.ops.layer_norm import layer_norm
from liger_core.ops.llama4_rope import llama4_rope
from liger_core.ops.logit_statistics import LogitStatistics, logit_statistics
from liger_core.ops.mhc_post import mhc_post
from liger_core.ops.mhc_pre import MHCPre, mhc_pre
from liger_core.ops.modulated_rms_norm import modulated_rms_norm
from liger_core.ops.poly_norm import poly_norm
from liger_core.ops.quantize import Quantized, quantize
from liger_core.ops.quantize_gated import quantize_gated
from liger_core.ops.quantize_gated_gradients import QuantizedGradients, quantize_gated_gradients
from liger_core.ops.qwen2vl_mrope import qwen2vl_mrope
from liger_core.ops.relu_squared import relu_squared
from liger_core.ops.rms_norm import rms_norm
from liger_core.ops.rope import rope
from liger_core.ops.softmax import softmax
from liger_core.ops.sparsemax import sparsemax
from liger_core.ops.swiglu import swiglu
from liger_core.ops.tvd import tvd
from liger_core.recompute import lean
from liger_core.scaled import quantize_input, scaled_gated_mlp, scaled_linear

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """`__version__`: that of the installed distribution, which is read when somebody asks."""
        if name == "__version__":
            from importlib.metadata import version

            return version("liger-core")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "BackendInfo",
    "CrossEntropyOutput",
    "DistillationOutput",
    "GRPOOutput",
    "LogitStatistics",
    "MHCPre",
    "Quantized",
    "QuantizedGradients",
    "Unsupported",
    "attn_res",
    "backends",
    "cross_entropy",
    "distillation",
    "dyt",
    "embedding",
    "explain",
    "fused_add_rms_norm",
    "fused_linear_cross_entropy",
    "fused_linear_distillation",
    "fused_linear_jsd",
    "fused_linear_kl_div",
    "fused_linear_logit_statistics",
    "fused_moe",
    "fused_neighborhood_attention",
    "gated_mlp",
    "geglu",
    "get_current_backend",
    "get_op",
    "group_norm",
    "grpo_loss",
    "infer_device",
    "jsd",
    "kl_div",
    "layer_norm",
    "lean",
    "list_overridden_ops",
    "llama4_rope",
    "logit_statistics",
    "losses",
    "mhc_post",
    "mhc_pre",
    "modulated_rms_norm",
    "poly_norm",
    "quantize",
    "quantize_gated",
    "quantize_gated_gradients",
    "quantize_input",
    "qwen2vl_mrope",
    "relu_squared",
    "rms_norm",
    "rope",
    "scaled_gated_mlp",
    "scaled_linear",
    "softmax",
    "sparsemax",
    "swiglu",
    "tvd",
    "use",
]
