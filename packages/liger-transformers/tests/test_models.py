"""A swapped model has the plain model's loss, gradients and logits, and calls the ops that its report names."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from tiny_models import IMAGE_MODELS, TEXT_MODELS, assert_same, batch, build, classes, run, skip_unknown

import liger_transformers
from liger_transformers.logits import Logits

NOT_CALLED = {
    "bart": {"layer_norm": 2},  # there is no encoder to attend to
    "falcon_h1": {"swiglu": 2},  # the mixer's activation follows a convolution
    "qwen3_next": {"swiglu": 1},  # so does that of 5.2's linear attention
}
"""Modules that are swapped and have no part in the op: their forward takes another way."""

CALLED_TWICE = {"llama4_text": {"rms_norm": 2}, "nanochat": {"rms_norm": 1}}
"""Calls beyond one a module: a norm without a weight, of queries and of keys, or of embeddings too."""


@pytest.mark.parametrize("name", [*TEXT_MODELS, *IMAGE_MODELS])
def test_loss_gradients_and_logits(name: str, calls: Counter[str]) -> None:
    skip_unknown(name)
    model, inputs = build(name), batch(name)
    swapped = copy.deepcopy(model)
    report = liger_transformers.apply(swapped)

    calls.clear()
    want = run(model, inputs)
    assert not calls
    actual = run(swapped, inputs)
    assert calls["fused_linear_cross_entropy"] == 1
    assert type(actual[0].logits) is Logits
    assert_same(want, actual)
    torch.testing.assert_close(actual[0].logits, want[0].logits, rtol=1e-4, atol=1e-4)
    for op, count in report.ops.items():
        unused = NOT_CALLED.get(name, {}).get(op, 0)
        again = CALLED_TWICE.get(name, {}).get(op, 0)
        assert count - unused <= calls[op] - again <= count, (
            f"{op}: swapped in {count} modules, called {calls[op]} times"
        )

    items = torch.tensor(37)
    assert_same(run(model, inputs, num_items_in_batch=items), run(swapped, inputs, num_items_in_batch=items))

    model.eval(), swapped.eval()
    with torch.no_grad():
        torch.testing.assert_close(swapped(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)
        assert type(swapped(**inputs, skip_logits=True).logits) is Logits

    liger_transformers.restore(swapped)
    assert classes(swapped.modules()) == classes(model.modules())
    calls.clear()
    swapped(**inputs)
    assert not calls
