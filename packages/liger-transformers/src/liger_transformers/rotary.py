"""Rotary functions: running one on random numbers shows which op it is, and then the modules that call it are swapped."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import liger_core as liger
from liger_transformers.deferred import materialize
from liger_transformers.probe import PROBE_ERRORS
from liger_transformers.swap import Swap, by_forward, has_own_forward, subclass, swapped_for

Rotated = tuple[Tensor, Tensor]
OPS = ("llama4_rope", "qwen2vl_mrope", "rope")


def rotary(module: nn.Module) -> Swap:
    """The swap of a module whose forward calls a rotary function: the same code, with that one name bound to the op."""
    if (op := swapped_for(module)) is not None:
        return type(module) if "rope" in op else None
    swap = _rotary_class(type(module))
    return has_own_forward(module) or swap if swap is not None else None


@by_forward
def _rotary_class(cls: type[nn.Module]) -> Swap:
    forward = cls.forward
    inner = inspect.unwrap(forward)
    if not isinstance(inner, types.FunctionType):
        return None
    functions = {name: inner.__globals__.get(name) for name in inner.__code__.co_names}
    functions = {name: f for name, f in functions.items() if isinstance(f, types.FunctionType) and _parameters(f)}
    if not functions:
        return None
    decorators = _decorators(forward)
    if decorators is None:
        return "its forward is decorated"
    proved = {name: proof for name, f in functions.items() if (proof := _proof(f)).layouts}
    if not proved:
        return f"{', '.join(functions)}: it is none of {', '.join(OPS)}"
    namespace = {**inner.__globals__, **{name: _swap(functions[name], proof) for name, proof in proved.items()}}
    # If a function's globals have a `__name__`, Dynamo takes those of that module instead, and there the name has the original.
    del namespace["__name__"]
    bound = _copy(inner, namespace, inner.__closure__)
    for decorator in reversed(decorators):
        cells = [types.CellType(bound) if _holds(cell, decorator) else cell for cell in decorator.__closure__ or ()]
        wrapper = _copy(decorator, decorator.__globals__, tuple(cells))
        wrapper.__wrapped__ = bound  # type: ignore[attr-defined]
        bound = wrapper
    ops = {layout.name for proof in proved.values() for layout in proof.layouts.values()}
    return subclass(cls, bound, ", ".join(sorted(ops)))


def _decorators(forward: Any) -> list[types.FunctionType] | None:
    """The `deprecate_kwarg` decorators that transformers puts around a forward, outermost first; None if there are others.

    Such a decorator renames arguments, and its closure holds the function that it calls. So the same decorator goes around the
    copy of the forward.
    """
    decorators: list[types.FunctionType] = []
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        if (
            not isinstance(forward, types.FunctionType)
            or forward.__globals__.get("__name__") != "transformers.utils.deprecation"
        ):
            return None
        if sum(_holds(cell, forward) for cell in forward.__closure__ or ()) != 1:
            return None
        decorators.append(forward)
        forward = inner
    return decorators


def _holds(cell: types.CellType, decorator: Any) -> bool:
    """Whether this cell of a decorator's closure holds the function that it calls."""
    return cell.cell_contents is decorator.__wrapped__


def _copy(
    function: types.FunctionType, namespace: dict[str, Any], closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """The same code with other globals and another closure."""
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def _parameters(function: Callable[..., Any]) -> int:
    """How many of a rotary function's first parameters are tensors; 0 for another kind of function."""
    names = [*inspect.signature(function).parameters]
    return 4 if names[:4] == ["q", "k", "cos", "sin"] else 3 if names[:3] == ["xq", "xk", "freqs_cis"] else 0


def _of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    return liger.rope(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


def _of_tokens(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    q, k = liger.rope(q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin)
    return q.squeeze(0).transpose(0, 1), k.squeeze(0).transpose(0, 1)


def _backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    return liger.rope(q, k, cos, -sin)


def _of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    """Neighbouring columns, rotated by the angles of the first half. Columns without an angle aren't rotated."""
    half = cos.shape[-1] // 2
    padding = (0, q.shape[-1] // 2 - half)
    angles = F.pad(cos[0, :, :half], padding, value=1.0), F.pad(sin[0, :, :half], padding)
    return _of_complex_heads(q, k, torch.stack(angles, -1).unsqueeze(0))


def _sorted(x: Tensor) -> Tensor:
    """The even columns, then the odd ones."""
    pairs: Tensor = cast("Any", x).unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2)


def _of_sorted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    return liger.rope(_sorted(q), _sorted(k), cos, sin)


def _of_sorted_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Rotated:
    half = cos.shape[-1] // 2
    return _of_halves(_sorted(q), _sorted(k), cos[..., :half], sin[..., :half])


def _of_complex(q: Tensor, k: Tensor, freqs_cis: Tensor) -> Rotated:
    return liger.llama4_rope(q, k, freqs_cis[0])


def _of_complex_heads(q: Tensor, k: Tensor, freqs_cis: Tensor) -> Rotated:
    q, k = liger.llama4_rope(q.transpose(1, 2), k.transpose(1, 2), freqs_cis[0])
    return q.transpose(1, 2), k.transpose(1, 2)


class Layout(NamedTuple):
    """A way in which a rotary function may be an op.

    `shapes` are the calls that it takes, as `_shape` names them. `trial` is the one by which it is proved. With `single` the
    angles must be the same for the whole batch, because the op takes no others.
    """

    name: str
    shapes: tuple[str, ...]
    trial: str
    op: Callable[..., Rotated]
    single: bool = False


LAYOUTS = (
    Layout("rope", ("whole",), "whole", liger.rope),
    Layout("rope", ("part", "half"), "half", liger.rope),
    Layout("rope", ("half",), "half", _of_halves),
    Layout("rope", ("tokens",), "tokens", _of_tokens),
    Layout("qwen2vl_mrope", ("planes",), "planes", liger.qwen2vl_mrope),
    Layout("rope", ("whole",), "whole", _backwards),
    Layout("rope", ("whole",), "whole", _of_sorted),
    Layout("rope", ("whole",), "whole", _of_sorted_halves),
    Layout("llama4_rope", ("whole",), "whole", _of_pairs, single=True),
    Layout("llama4_rope", ("part", "half"), "half", _of_pairs, single=True),
    Layout("llama4_rope", ("complex",), "complex", _of_complex, single=True),
    Layout("llama4_rope", ("complex heads",), "complex heads", _of_complex_heads, single=True),
)


class Proof(NamedTuple):
    """The layout for each shape of call, and whether a narrower q keeps its dtype with float32 angles."""

    layouts: dict[str, Layout]
    keeps_dtype: bool


@functools.cache
def _proof(function: Callable[..., Any]) -> Proof:
    """The layouts in which the function is the op, found with random angles, all of them different."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k = draw(2, 3, 5, 8), draw(2, 1, 5, 8)
    trials = {
        "whole": (q, k, draw(2, 5, 8), draw(2, 5, 8)),
        "half": (q, k, draw(2, 5, 4), draw(2, 5, 4)),
        "tokens": (q[0].transpose(0, 1), k[0].transpose(0, 1), draw(5, 8), draw(5, 8)),
        "planes": (q, k, draw(3, 2, 5, 8), draw(3, 2, 5, 8), [1, 1, 2]),
        "complex": (q.transpose(1, 2), k.transpose(1, 2), torch.complex(draw(2, 5, 4), draw(2, 5, 4))),
        "complex heads": (q, k, torch.complex(draw(2, 5, 4), draw(2, 5, 4))),
    }
    layouts: dict[str, Layout] = {}
    keeps_dtype = True
    for layout in LAYOUTS:
        q, k, *angles = trials[layout.trial]
        if layout.single:
            angles = [angle[:1] for angle in angles]
        if layout.trial.startswith("complex") == (_parameters(function) == 4) or not {*layout.shapes} - {*layouts}:
            continue
        try:
            actual = function(q, k, *angles)
        except PROBE_ERRORS:
            continue  # a function that raises here is never called with this layout
        results = cast("tuple[Any, ...]", actual) if isinstance(actual, tuple) else ()
        if len(results) == 2 and all(map(_close, results, layout.op(q, k, *angles))):
            layouts.update({shape: layout for shape in layout.shapes if shape not in layouts})
            narrow = function(q.bfloat16(), k.bfloat16(), *angles)
            keeps_dtype = keeps_dtype and narrow[0].dtype == narrow[1].dtype == torch.bfloat16
    return Proof(layouts, keeps_dtype)


def _close(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def _shape(q: Tensor, k: Tensor, cos: Tensor, options: bool) -> str | None:
    """The kind of this call, by its shapes; None if no op takes it.

    ``"whole"``: q ``[B, heads, S, D]`` and angles ``[B, S, D]``. ``"part"``: angles of the first columns alone. ``"half"``:
    ``[B, S, D/2]``. ``"tokens"``: q ``[S, heads, D]`` and angles ``[S, D]``, as in vision towers. ``"planes"``: those of
    `qwen2vl_mrope`. ``"complex"``: q ``[B, S, heads, D]`` and complex angles ``[B, S, D/2]``; ``"complex heads"``: these with q
    ``[B, heads, S, D]``.
    """
    if q.dim() == k.dim() == 3 and cos.dim() == 2 and not options:
        same = q.shape[0] == k.shape[0] == cos.shape[0] and q.shape[2] == k.shape[2] == cos.shape[1]
        return "tokens" if same else None
    if not q.dim() == k.dim() == 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return None
    if cos.dim() != (4 if options else 3) or cos.shape[-3] not in (1, q.shape[0]):
        return None
    length, columns = cos.shape[-2:]
    if cos.is_complex():
        if columns * 2 != q.shape[3]:
            return None
        if length == q.shape[1] == k.shape[1]:
            return "complex"
        return "complex heads" if length == q.shape[2] == k.shape[2] else None
    if length != q.shape[2] or length != k.shape[2]:
        return None
    if options:
        return "planes"
    return "whole" if columns == q.shape[3] else "part" if columns * 2 != q.shape[3] else "half"


def _swap(original: Callable[..., Any], proof: Proof) -> Callable[..., Any]:
    """The op in the layouts in which `original` was proved to be it; `original` in the others."""

    def op_of(q: Tensor, k: Tensor, cos: Tensor, sections: bool = False) -> Callable[..., Rotated] | None:
        layout = proof.layouts.get(_shape(q, k, cos, sections) or "")
        if layout is None or (layout.single and cos.shape[0] != 1):
            return None
        same = q.dtype == k.dtype == cos.dtype or proof.keeps_dtype or torch.is_autocast_enabled(q.device.type)
        return layout.op if same else None

    def apply_rotary(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k = materialize(q), materialize(k)
        usual = not args and (not kwargs or (len(kwargs) == 1 and kwargs.get("unsqueeze_dim") == 1))
        sections = len(args) == 1 and not kwargs and isinstance(args[0], (list, tuple))
        turned = (usual or sections) and not (cos.requires_grad or sin.requires_grad)
        op = op_of(q, k, cos, sections) if turned and k is not None else None
        return original(q, k, cos, sin, *args, **kwargs) if op is None else op(q, k, cos, sin, *args)

    def apply_complex(xq: Tensor, xk: Tensor, freqs_cis: Tensor, *args: Any, **kwargs: Any) -> Any:
        xq, xk = materialize(xq), materialize(xk)
        op = None if args or kwargs or freqs_cis.requires_grad else op_of(xq, xk, freqs_cis)
        return original(xq, xk, freqs_cis, *args, **kwargs) if op is None else op(xq, xk, freqs_cis)

    return apply_rotary if _parameters(original) == 4 else apply_complex
