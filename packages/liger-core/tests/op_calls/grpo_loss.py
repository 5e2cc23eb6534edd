"""Calls that grpo_loss refuses."""

from typing import Any

import torch

from op_calls import BadCall, integers, mask, randn


def _good(**changed: Any) -> dict[str, Any]:
    return {
        "logits": randn(2, 4, 8),
        "old_logps": randn(2, 3),
        "ref_logps": randn(2, 3),
        "completion_ids": integers(0, 8, 2, 3),
        "advantages": randn(2),
        **changed,
    }


def _integers(name: str) -> BadCall:
    return BadCall(
        f"integer-{name.replace('_', '-')}",
        TypeError,
        (name, "int64"),
        lambda: _good(**{name: integers(0, 8, 2, 3)}),
    )


def _shape(name: str) -> BadCall:
    return BadCall(
        f"short-{name.replace('_', '-')}",
        ValueError,
        (name, "(2, 2)", "(2, 3)"),
        lambda: _good(**{name: _good(completion_mask=mask(0.5, 2, 3))[name][:, 1:]}),
    )


def _option(id: str, error: type[Exception], says: tuple[str, ...], **options: Any) -> BadCall:
    """The first option is the one that the message names."""
    return BadCall(id, error, (next(iter(options)), *says), lambda: _good(**options))


BAD = (
    *(_integers(name) for name in ("logits", "old_logps", "ref_logps", "advantages", "importance_sampling_ratio")),
    BadCall("float-ids", TypeError, ("completion_ids", "float32"), lambda: _good(completion_ids=randn(2, 3))),
    BadCall(
        "complex-mask",
        TypeError,
        ("completion_mask", "complex64"),
        lambda: _good(completion_mask=randn(2, 3, dtype=torch.complex64)),
    ),
    BadCall(
        "ids-not-a-tensor",
        TypeError,
        ("completion_ids", "list"),
        lambda: _good(completion_ids=[[1] * 3] * 2),
    ),
    BadCall("flat-logits", ValueError, ("logits", "2 dimensions"), lambda: _good(logits=randn(4, 8))),
    BadCall("no-classes", ValueError, ("logits", "(2, 4, 0)"), lambda: _good(logits=randn(2, 4, 0))),
    BadCall("no-positions", ValueError, ("logits", "(2, 0, 8)"), lambda: _good(logits=randn(2, 0, 8))),
    *(_shape(name) for name in ("completion_ids", "old_logps", "ref_logps", "completion_mask")),
    BadCall(
        "advantages-by-token",
        ValueError,
        ("advantages", "(2, 3)", "(2,)"),
        lambda: _good(advantages=randn(2, 3)),
    ),
    BadCall(
        "importance-by-column",
        ValueError,
        ("importance_sampling_ratio", "(3,)", "(2,), (2, 1) or (2, 3)"),
        lambda: _good(importance_sampling_ratio=randn(3)),
    ),
    BadCall("no-ref-logps", ValueError, ("ref_logps", "None", "beta"), lambda: _good(ref_logps=None)),
    _option("unknown-loss-type", ValueError, ("'ppo'", "'grpo'"), loss_type="ppo"),
    _option("unknown-level", ValueError, ("'row'", "'token'"), importance_sampling_level="row"),
    _option("unknown-reduction", ValueError, ("'sum'", "'mean'"), reduction="sum"),
    _option("temperature-not-a-number", TypeError, ("'1'",), temperature="1"),
    _option("temperature-zero", ValueError, ("0.0",), temperature=0.0),
    _option("beta-not-a-number", TypeError, ("None",), beta=None),
    _option("negative-beta", ValueError, ("-0.1",), beta=-0.1),
    _option("eps-low-not-a-number", TypeError, ("None",), eps_low=None),
    _option("negative-eps-low", ValueError, ("-0.1",), eps_low=-0.1),
    _option("eps-high-not-a-number", TypeError, ("None",), eps_high=None),
    _option("negative-eps-high", ValueError, ("-0.1",), eps_high=-0.1),
    _option("delta-not-a-number", TypeError, ("'2'",), delta="2"),
    _option("delta-zero", ValueError, ("0.0",), delta=0.0),
    _option("log-ratio-clip-not-a-number", TypeError, ("'20'",), log_ratio_clip="20"),
    _option("log-ratio-clip-zero", ValueError, ("0.0",), log_ratio_clip=0.0),
    _option("delta-with-cispo", ValueError, ("2.0", "'cispo'"), delta=2.0, loss_type="cispo"),
    _option("delta-with-sapo", ValueError, ("2.0", "'sapo'"), delta=2.0, loss_type="sapo"),
    _option("max-length-not-an-int", TypeError, ("9.0",), max_completion_length=9.0),
    _option("max-length-zero", ValueError, ("0",), max_completion_length=0),
    _option("items-not-a-number", TypeError, ("'7'",), num_items_in_batch="7"),
    _option("no-items", ValueError, ("0", "greater than 0"), num_items_in_batch=0),
    _option("negative-items", ValueError, ("-2.5",), num_items_in_batch=-2.5),
    BadCall(
        "no-items-in-a-tensor",
        ValueError,
        ("num_items_in_batch", "0", "greater than 0"),
        lambda: _good(num_items_in_batch=torch.tensor(0)),
    ),
    *(
        BadCall(
            f"mask-of-{value}",
            ValueError,
            ("completion_mask", f"holds {value}", "0 and 1"),
            lambda value=value: _good(
                completion_mask=mask(0.5, 2, 3).to(type(value)).masked_fill(mask(1.0, 2, 3), value)
            ),
        )
        for value in (-100, 2, 0.5)
    ),
    BadCall(
        "items-by-row",
        ValueError,
        ("num_items_in_batch", "1 dimensions"),
        lambda: _good(num_items_in_batch=randn(2)),
    ),
    _option("bias-correction-not-a-bool", TypeError, ("1",), use_bias_correction_kl=1),
    _option("sapo-pos-not-a-number", TypeError, ("None",), sapo_temperature_pos=None),
    _option("sapo-pos-zero", ValueError, ("0.0",), sapo_temperature_pos=0.0),
    _option("sapo-neg-not-a-number", TypeError, ("None",), sapo_temperature_neg=None),
    _option("sapo-neg-negative", ValueError, ("-1.0",), sapo_temperature_neg=-1.0),
    BadCall(
        "id-too-high",
        IndexError,
        ("completion_ids", "8", "0 to 7"),
        lambda: _good(completion_ids=integers(8, 9, 2, 3)),
    ),
    BadCall(
        "negative-id",
        IndexError,
        ("completion_ids", "-100"),
        lambda: _good(completion_ids=integers(-100, -99, 2, 3)),
    ),
)
