"""Checks of an op's arguments, shared by the contracts. Each raises before any kernel runs.

A message names the op, the argument, the value that it got and the values that it takes. Checks read metadata only, so they cost
no device sync and can be traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtypes(op: str, accepted: Sequence[torch.dtype], **tensors: Tensor | None) -> None:
    """Each tensor that is not None has one of the `accepted` dtypes, or TypeError."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in accepted:
            takes = ", ".join(dtype_name(d) for d in accepted)
            raise TypeError(f"{op}: {name} has dtype {dtype_name(tensor.dtype)}; it takes {takes}")


def floating(op: str, **tensors: Tensor | None) -> None:
    """Each tensor that is not None is float32, bfloat16 or float16 (or float64, which the reference takes)."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(
                f"{op}: {name} has dtype {dtype_name(tensor.dtype)}; it takes float32, bfloat16, float16 "
                "(float64 in the reference)"
            )


def same_dtype(op: str, **tensors: Tensor | None) -> None:
    """The tensors that are not None have one dtype, the first one's, or TypeError."""
    first = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = name, tensor.dtype
        elif tensor.dtype != first[1]:
            raise TypeError(
                f"{op}: {name} has dtype {dtype_name(tensor.dtype)}; it takes {first[0]}'s, {dtype_name(first[1])}"
            )


def ndim(op: str, least: int, most: int | None = None, **tensors: Tensor | None) -> None:
    """Each tensor that is not None has between `least` and `most` dimensions (`most` None: no limit), or ValueError."""
    for name, tensor in tensors.items():
        if tensor is not None and not least <= tensor.dim() <= (tensor.dim() if most is None else most):
            takes = f"{least}" if most == least else f"{least} or more" if most is None else f"{least} to {most}"
            raise ValueError(f"{op}: {name} has {tensor.dim()} dimensions {tuple(tensor.shape)}; it takes {takes}")


def shape(op: str, name: str, tensor: Tensor | None, expected: Sequence[int], because: str = "") -> None:
    """`tensor`, unless it is None, has exactly the `expected` shape, or ValueError. `because` is the shape's reason."""
    if tensor is not None and tuple(tensor.shape) != tuple(expected):
        takes = f"{tuple(expected)}" + (f", {because}" if because else "")
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}; it takes {takes}")


def one_of(op: str, accepted: Sequence[Any], **options: Any) -> None:
    """Each option is one of the `accepted` values, or ValueError."""
    for name, value in options.items():
        if value not in accepted:
            raise ValueError(f"{op}: {name} is {value!r}; it takes {', '.join(map(repr, accepted))}")


def number(op: str, *, above: float | None = None, least: float | None = None, **options: Any) -> None:
    """Each option is an int or a float (TypeError), greater than `above`, and at least `least` (ValueError)."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{op}: {name} is {value!r}; it takes a number")
        if above is not None and not value > above:
            raise ValueError(f"{op}: {name} is {value!r}; it takes a number greater than {above}")
        if least is not None and not value >= least:
            raise ValueError(f"{op}: {name} is {value!r}; it takes a number that is at least {least}")


def integer(op: str, *, least: int | None = None, **options: Any) -> None:
    """Each option is an int (TypeError) that is at least `least` (ValueError)."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{op}: {name} is {value!r}; it takes an int")
        if least is not None and value < least:
            raise ValueError(f"{op}: {name} is {value!r}; it takes an int that is at least {least}")


def label(op: str, **options: Any) -> None:
    """Each option is an int (TypeError) that labels, of 64 bits, can hold (ValueError)."""
    integer(op, **options)
    for name, value in options.items():
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{op}: {name} is {value!r}; it takes an int of 64 bits")


def flag(op: str, **options: Any) -> None:
    """Each option is a bool, or TypeError."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{op}: {name} is {value!r}; it takes True or False")


def mask_values(op: str, **masks: Tensor | None) -> None:
    """Every element of each mask that is not None is 0 or 1, or ValueError. Reads the data: a device sync."""
    for name, mask in masks.items():
        if mask is None or mask.dtype is torch.bool:
            continue
        wrong = (mask != 0) & (mask != 1)
        if wrong.any():
            raise ValueError(f"{op}: {name} holds {mask[wrong].flatten()[0].item()}; it takes 0 and 1")


def indices_below(op: str, name: str, indices: Tensor, limit: int, ignore: int | None = None) -> None:
    """Every element of `indices` that isn't `ignore` lies in [0, limit), or IndexError. Reads the data: a device sync."""
    wrong = (indices < 0) | (indices >= limit)
    if ignore is not None:
        wrong &= indices != ignore
    if wrong.any():
        first = int(indices[wrong].flatten()[0])
        takes = f"0 to {limit - 1}" + (f", or ignore_index {ignore}" if ignore is not None else "")
        raise IndexError(f"{op}: {name} holds {first}; it takes {takes}")
