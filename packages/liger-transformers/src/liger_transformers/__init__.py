"""Hugging Face models on liger_core's ops: leaf modules are swapped. No forward is rewritten, and no model is named."""

from liger_transformers.apply import Report, apply, report, restore
from liger_transformers.callback import LigerCallback
from liger_transformers.experts import register_experts

__all__ = ["LigerCallback", "Report", "apply", "register_experts", "report", "restore"]
