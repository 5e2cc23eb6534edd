"""Stand-ins: modules of a class without a model's weights, on which the class's forward runs beside an op.

No name of a model or class decides about a swap. No weight of the model is read, so a model that is on the meta device, sharded
or quantised is proved like any other.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

PROBE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that a forward may raise on a stand-in of the wrong kind. The reason for leaving the module quotes the error."""


def plain_attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The module's own numbers and strings, on which its forward may depend."""
    types = (bool, int, float, str, tuple, type(None))
    attributes: dict[str, Any] = vars(module)
    return tuple(
        (name, cast("Any", value))
        for name, value in attributes.items()
        if name != "training" and not name.startswith("_") and isinstance(value, types)
    )


def stand_in_for(cls: type[nn.Module], attributes: tuple[tuple[str, Any], ...]) -> nn.Module:
    """A module of this class with these attributes, and without parameters and children."""
    stand_in = object.__new__(cls)
    nn.Module.__init__(stand_in)
    stand_in.__dict__.update(attributes)
    return stand_in
