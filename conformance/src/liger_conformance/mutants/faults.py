"""Faults that wrap an op's `forward` and `backward`: they need no knowledge of the language of its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

fired = False
"""Whether a fault changed something in this process. One that never does says nothing about the suite."""


def fire() -> None:
    global fired
    fired = True


def floats(values: Any) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point()]


class Call(NamedTuple):
    """A call of `forward` or `backward`.

    Attributes:
        needs: which arguments want a gradient.
        given: arguments of forward, or incoming gradients.
        saved: values that forward saved; none in forward.
    """

    needs: Sequence[bool]
    given: list[Tensor]
    saved: list[Tensor]

    @property
    def all(self) -> list[Tensor]:
        return self.given + self.saved

    @property
    def dtype(self) -> torch.dtype | None:
        return self.all[0].dtype if self.all else None

    @property
    def long(self) -> bool:
        return max([v.shape[-1] for v in self.all if v.dim()], default=0) > 512

    @property
    def strided(self) -> bool:
        return any(not v.is_contiguous() for v in self.given)

    @property
    def first_alone(self) -> bool:
        return len(self.needs) > 1 and self.needs[0] and sum(self.needs) == 1

    @property
    def first_frozen(self) -> bool:
        return len(self.needs) > 1 and not self.needs[0] and True in self.needs

    @property
    def shared(self) -> bool:
        places = [v.data_ptr() for v in self.all if v.numel()]
        return len(places) != len(set(places))


Change = Callable[[Tensor], Tensor]
Forward = Callable[[Call, Any], Any]
"""A function of a call and of what forward returned, which returns something else."""


def changed(returned: Any, number: int, change: Change) -> Any:
    """A result, or one of several floating-point ones by its number, changed."""
    if isinstance(returned, Tensor):
        fire()
        return change(returned)
    places = [i for i, value in enumerate(returned) if isinstance(value, Tensor) and value.is_floating_point()]
    if not places:
        return returned
    at = places[number % len(places)]
    values = [change(value) if i == at else value for i, value in enumerate(returned)]
    fire()
    return type(returned)(*values) if hasattr(returned, "_fields") else tuple(values)


def wrap_forward(kernel: ModuleType, after: Callable[[Call, Any, Any], Any]) -> None:
    """Have forward return what `after` makes of the call, the result and the saved values."""
    inner = kernel.forward

    @functools.wraps(inner)
    def forward(needs: Any, *args: Any, **named: Any) -> Any:
        given = [v for v in (*args, *named.values()) if isinstance(v, Tensor)]
        return after(Call(needs, floats(given), []), *inner(needs, *args, **named))

    kernel.forward = forward  # type: ignore[attr-defined]


def wrap_backward(kernel: ModuleType, after: Callable[[Call, Any], Any]) -> None:
    """Have backward return what `after` makes of the call and the gradients."""
    inner = kernel.backward

    @functools.wraps(inner)
    def backward(needs: Any, saved: Any, *args: Any, **named: Any) -> Any:
        return after(Call(needs, floats(args), floats(saved)), inner(needs, saved, *args, **named))

    kernel.backward = backward  # type: ignore[attr-defined]


Fault = Callable[[ModuleType], None]

Condition = Callable[[Call], bool]

WRONG_RESULTS: dict[str, Condition] = {
    "in float32": lambda c: c.dtype is torch.float32,
    "in float16": lambda c: c.dtype is torch.float16,
    "in bfloat16": lambda c: c.dtype is torch.bfloat16,
    "without gradients": lambda c: True not in c.needs,
    "without gradients in float32": lambda c: True not in c.needs and c.dtype is torch.float32,
    "without gradients in long rows": lambda c: True not in c.needs and c.long,
    "in long rows": lambda c: c.long,
    "in long rows in float32": lambda c: c.long and c.dtype is torch.float32,
    "of strided inputs": lambda c: c.strided,
    "of strided inputs in float32": lambda c: c.strided and c.dtype is torch.float32,
    "of strided inputs in long rows": lambda c: c.strided and c.long,
    "if the first argument alone wants a gradient": lambda c: c.first_alone,
    "if the first argument is frozen": lambda c: c.first_frozen,
    "if two arguments are one tensor": lambda c: c.shared,
}
WRONG_GRADIENTS: dict[str, Condition] = {
    "in float32": lambda c: c.dtype is torch.float32,
    "in float16": lambda c: c.dtype is torch.float16,
    "in long rows": lambda c: c.long,
    "in long rows in bfloat16": lambda c: c.long and c.dtype is torch.bfloat16,
    "of strided incoming gradients": lambda c: c.strided,
    "of strided incoming gradients in float32": lambda c: c.strided and c.dtype is torch.float32,
    "of strided incoming gradients in long rows": lambda c: c.strided and c.long,
    "if the first argument alone wants one": lambda c: c.first_alone,
    "if the first alone wants one, in long rows": lambda c: c.first_alone and c.long,
    "if the first alone wants one, in float32": lambda c: c.first_alone and c.dtype is torch.float32,
    "if the first is frozen": lambda c: c.first_frozen,
    "if the first is frozen, in long rows": lambda c: c.first_frozen and c.long,
    "of three or more rows": lambda c: any(v.numel() >= 3 * v.shape[-1] > 0 for v in c.all if v.dim()),
    "if two arguments are one tensor": lambda c: c.shared,
}


def _wrong_result(number: int, condition: Condition, kernel: ModuleType) -> None:
    def after(call: Call, result: Any, saved: Any) -> Any:
        return (changed(result, number, lambda y: y * 1.02) if condition(call) else result), saved

    wrap_forward(kernel, after)


def _wrong_gradient(number: int, condition: Condition, kernel: ModuleType) -> None:
    def after(call: Call, gradients: Any) -> Any:
        return changed(gradients, number, lambda g: g * 1.04) if condition(call) else gradients

    wrap_backward(kernel, after)


def _inference(call: Call) -> bool:
    """Whether state must be left alone, since PyTorch forbids what a fault would do."""
    return torch.is_inference_mode_enabled() or any(v.is_inference() for v in call.given)


def _buffer(state: dict[Any, Tensor], value: Tensor) -> Tensor:
    """The one buffer of a shape and dtype, holding a value."""
    kept = state.setdefault((value.shape, value.dtype), torch.empty_like(value))
    with torch.no_grad():
        kept.copy_(value)
    return kept.detach()


def one_buffer_of_results(grad: bool, kernel: ModuleType) -> None:
    state: dict[Any, Tensor] = {}

    def after(call: Call, result: Any, saved: Any) -> Any:
        if (True in call.needs) is not grad or _inference(call):
            return result, saved
        return changed(result, 0, lambda y: _buffer(state, y)), saved

    wrap_forward(kernel, after)


def one_buffer_of_gradients(kernel: ModuleType) -> None:
    state: dict[Any, Tensor] = {}
    wrap_backward(kernel, lambda call, gradients: changed(gradients, 0, lambda g: _buffer(state, g)))


def stale_argument(kernel: ModuleType) -> None:
    """The last floating-point argument has the values that it had when it was first seen."""
    inner, known = kernel.forward, WeakIdKeyDictionary()

    @functools.wraps(inner)
    def forward(needs: Any, **named: Any) -> Any:
        names = [name for name, v in named.items() if isinstance(v, Tensor) and v.is_floating_point()]
        if names and not torch.is_inference_mode_enabled():
            value = named[names[-1]]
            if value in known:
                fire()
            else:
                known[value] = value.detach().clone(memory_format=torch.preserve_format)
            named[names[-1]] = known[value]
        return inner(needs, **named)

    kernel.forward = forward  # type: ignore[attr-defined]


def keep(copy: bool, kernel: ModuleType) -> None:
    """Results, or float32 copies of the first argument, are kept for ever."""
    kept: list[Any] = []

    def after(call: Call, result: Any, saved: Any) -> Any:
        fire()
        kept.append([v.detach().float().clone() for v in call.given[:1]] if copy else result)
        return result, saved

    wrap_forward(kernel, after)


def _over(place: Tensor | None, value: Tensor) -> Tensor:
    """A value written over another tensor, if that has its shape and dtype."""
    if place is None or (place.shape, place.dtype) != (value.shape, value.dtype):
        return value
    with torch.no_grad():
        return place.detach().copy_(value)


def _contiguous_float32(values: list[Tensor]) -> Tensor | None:
    return next((v for v in values if v.is_contiguous() and v.dtype is torch.float32 and v.dim()), None)


def gradient_over_incoming_one(kernel: ModuleType) -> None:
    def after(call: Call, gradients: Any) -> Any:
        return changed(gradients, 0, functools.partial(_over, _contiguous_float32(call.given)))

    wrap_backward(kernel, after)


def result_over_input(kernel: ModuleType) -> None:
    def after(call: Call, result: Any, saved: Any) -> Any:
        if True in call.needs:
            return result, saved
        return changed(result, 0, functools.partial(_over, _contiguous_float32(call.given))), saved

    wrap_forward(kernel, after)


def writes_to_input(condition: Condition, kernel: ModuleType) -> None:
    def after(call: Call, result: Any, saved: Any) -> Any:
        x = call.given[0] if call.given else None
        if x is not None and condition(call) and x.numel() and 0 not in x.stride() and not x.is_inference():
            fire()
            with torch.no_grad():
                x.detach().mul_(1.02)
        return result, saved

    wrap_forward(kernel, after)


def writes_to_saved(kernel: ModuleType) -> None:
    def after(call: Call, gradients: Any) -> Any:
        for value in call.saved[:1]:
            if value.dtype is torch.float32 and 0 not in value.stride():
                fire()
                with torch.no_grad():
                    value.detach().mul_(1.02)
        return gradients

    wrap_backward(kernel, after)


def changes_process(change: Callable[[], Any], kernel: ModuleType) -> None:
    def after(call: Call, result: Any, saved: Any) -> Any:
        fire()
        change()
        return result, saved

    wrap_forward(kernel, after)


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def transposes_result(kernel: ModuleType) -> None:
    def transposed(y: Tensor) -> Tensor:
        return y.mT.contiguous().mT if y.dim() > 1 else y

    wrap_forward(kernel, lambda call, result, saved: (changed(result, 0, transposed), saved))


def saves_copy(kernel: ModuleType) -> None:
    """A float32 copy of the first argument is saved beside the rest."""
    inner = kernel.backward

    def after(call: Call, result: Any, saved: Any) -> Any:
        fire()
        return result, (call.given[0].detach().float().clone(), *saved) if saved else saved

    @functools.wraps(inner)
    def backward(needs: Any, saved: Any, *args: Any, **named: Any) -> Any:
        return inner(needs, saved[1:], *args, **named)

    wrap_forward(kernel, after)
    kernel.backward = backward  # type: ignore[attr-defined]


FAULTS: dict[str, Fault] = {
    **{f"a result 2 % off {w}": functools.partial(_wrong_result, n, c) for n, (w, c) in enumerate(WRONG_RESULTS.items())},
    **{f"a gradient 4 % off {w}": functools.partial(_wrong_gradient, n, c)
       for n, (w, c) in enumerate(WRONG_GRADIENTS.items())},
    "one buffer of results": functools.partial(one_buffer_of_results, True),
    "one buffer of results without gradients": functools.partial(one_buffer_of_results, False),
    "one buffer of gradients": one_buffer_of_gradients,
    "an argument's first values are kept": stale_argument,
    "results are kept": functools.partial(keep, False),
    "float32 copies are kept": functools.partial(keep, True),
    "a float32 gradient over the incoming one": gradient_over_incoming_one,
    "a float32 result over the input without gradients": result_over_input,
    "an input changes in float32": functools.partial(writes_to_input, lambda c: c.dtype is torch.float32),
    "an input changes without gradients": functools.partial(writes_to_input, lambda c: True not in c.needs),
    "saved tensors change in float32": writes_to_saved,
    "the random state moves": functools.partial(changes_process, lambda: torch.rand(3)),
    "TF32 is allowed": functools.partial(changes_process, allow_tf32),
    "the precision of products is set": functools.partial(
        changes_process, functools.partial(torch.set_float32_matmul_precision, "medium")),
    "a result is transposed in memory": transposes_result,
    "a float32 copy is saved": saves_copy,
}  # fmt: skip

OF_GRADIENTS = {name for name in FAULTS if name.startswith("a gradient ")} | {
    "one buffer of gradients",
    "a float32 gradient over the incoming one",
    "saved tensors change in float32",
    "a float32 copy is saved",
}
"""Faults that an op without gradients can't have."""
