"""The `liger-transformers` command: what `apply` would swap in a model, from its configuration alone."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from liger_transformers.apply import apply
from liger_transformers.probe import PROBE_ERRORS

AUTO = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModel)
"""The classes are tried in this order."""

EXTRAS = ("mlp", "experts", "lean")
"""Swaps that are made only on request."""

BUILD_ERRORS = (*PROBE_ERRORS, ImportError, OSError, StrictDataclassError)
"""Errors of a configuration of which no model can be built."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (1: nothing would be swapped, 2: there is no such model)."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    if words[:1] == ["compare"]:
        from liger_transformers import compare

        return compare.main(words[1:])
    parser = argparse.ArgumentParser(
        prog="liger-transformers",
        description=__doc__,
        epilog="The exit status is 1 if nothing would be swapped, and 2 if there is no such model. "
        "`liger-transformers compare MODEL_TYPE` trains a few steps without the swaps and with them.",
    )
    parser.add_argument("model", metavar="MODEL_TYPE", help="such as llama; or a directory that holds a config.json")
    for name in EXTRAS:
        parser.add_argument(f"--{name}", action="store_true", help=f"as apply(model, {name}=True) does")
    options = parser.parse_args(words)
    try:
        model = on_meta(options.model)
    except ValueError as error:
        print(f"liger-transformers: {error}", file=sys.stderr)
        return 2
    switches: dict[str, Any] = {name: True for name in EXTRAS if getattr(options, name)}
    report = apply(model, strict=False, **switches)
    print(report)
    return 0 if report.ops else 1


def config_of(name: str) -> Any:
    """The configuration of this type, or of this directory. ValueError if there is none."""
    configs: Any = AutoConfig
    if not os.path.isdir(name) and name not in CONFIG_MAPPING:
        close = difflib.get_close_matches(name, list(CONFIG_MAPPING), 5)
        raise ValueError(
            f"transformers has no model type {name!r}"
            + (f"; close to it: {', '.join(close)}" if close else "")
            + ". It takes a `model_type`, such as llama, or a directory that holds a config.json; nothing is downloaded"
        )
    try:
        return configs.from_pretrained(name) if os.path.isdir(name) else configs.for_model(name)
    except BUILD_ERRORS as error:
        raise _no_model(name, error) from error


def on_meta(name: str) -> PreTrainedModel:
    """A model of this type, or of this directory's configuration, that takes no memory. ValueError if there is none."""
    config = config_of(name)
    try:
        auto: Any = next((auto for auto in AUTO if type(config) in auto._model_mapping), None)
        with torch.device("meta"):
            model = auto.from_config(config) if auto is not None else None
    except BUILD_ERRORS as error:
        raise _no_model(name, error) from error
    if model is None:
        raise ValueError(f"transformers has no text model of type {name!r}")
    return model


def _no_model(name: str, error: Exception) -> ValueError:
    return ValueError(
        f"transformers can't build a model of {name!r}: {type(error).__name__}: {error}. Some types' default "
        "configurations build nothing: name a directory that holds a model's config.json"
    )


if __name__ == "__main__":
    sys.exit(main())
