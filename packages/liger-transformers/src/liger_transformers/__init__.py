"""Hugging Face models on liger_core's ops: leaf modules are swapped, no forward is rewritten, no model is named."""

from liger_transformers.apply import Report, apply, restore
from liger_transformers.callback import LigerCallback

__all__ = ["LigerCallback", "Report", "apply", "restore"]
