"""Losses of a linear layer's log-probabilities that are sums over groups of tokens, such as the pairs of DPO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_core import checks, recompute, torch_state
from liger_core.autograd import without_second_derivatives
from liger_core.losses.logprobs import TokenLogprobsOutput, fused_linear_token_logprobs
from liger_core.ops.fused_linear_logit_statistics import most_statistics_memory

NAME = "fused_linear_grouped_loss"
NO_DOUBLE = (
    f"{NAME} has no second derivative; the same of fused_linear_token_logprobs has, inside of liger_core.use('torch')"
)


def fused_linear_grouped_loss(
    loss: Callable[..., Any],
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *inputs: Tensor | None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    accum_dtype: torch.dtype = torch.float32,
    memory_budget: int | None = None,
) -> Any:
    """Σ over groups g of ``loss(logprobs[g], *(i[g] for i in inputs))``: a trained head takes 3 products instead of 4.

    The gradient of a loss of log-probabilities isn't known before all of them are. So its backward makes the logits again, which
    is one product of x and linear_weight. A loss that adds up over groups of tokens (DPO: a pair; GRPO: a completion) is known
    group by group. Then a group's logits are held until its gradients are made, in forward. Backward scales these.

    Without a gradient of linear_weight, for DTensors, inside of torch.compile or of a checkpointed region, and where other hooks
    take what autograd saves, the same is computed from the log-probabilities of all groups. That takes the four products, and the
    memory of `fused_linear_token_logprobs`.

    The gradient of a logit is rounded once to x's dtype, a group's gradients of x and of linear_weight once to theirs. The latter
    are added up in `accum_dtype`. A power of two keeps small gradients from underflow in float16.

    Args:
        loss: takes a group's log-probabilities, float32 ``[...]``, and its inputs. Returns a scalar; or a tuple of it and of
            tensors without a gradient, or None, such as `PreferenceOutput`. It is called once per group.
        x: ``[G, ..., H]``, a group per row; float32, bfloat16 or float16.
        linear_weight: ``[V, H]``, in x's dtype.
        target: int64 ``[G, ...]``, as in `fused_linear_token_logprobs`.
        *inputs: what the loss takes beside, each ``[G, ...]``, or None. They are constants.
        bias: ``[V]``, or None.
        temperature, softcap, ignore_index: as in `fused_linear_token_logprobs`.
        return_entropy: the loss takes a `TokenLogprobsOutput`, all of whose fields are ``[...]``, in place of log-probabilities.
        accum_dtype: the dtype in which gradients of linear_weight and bias are added up: float32, bfloat16 or float16.
        memory_budget: bytes for a group's logits and their gradient, as in `fused_linear_token_logprobs`. None takes
            what all of them need, 6 bytes a logit. With less, logits are made again.

    Returns:
        What the loss returns: the scalars' sum, and of each other tensor ``[G, ...]``.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, no group, an option out of its range, a `memory_budget` below the least,
            tensors on different devices, or a loss that depends on other tensors that require a gradient.
        IndexError: a token out of range, on the CPU.

    Source:
        `fused_linear_token_logprobs`. Groups of a preference loss: Hsu et al., Liger Kernel, arXiv 2410.10989.

    >>> def likelihood(logprobs):
    ...     return -logprobs.sum()
    >>> fused_linear_grouped_loss(likelihood, torch.ones(2, 3, 2), torch.zeros(4, 2), torch.ones(2, 3, dtype=torch.int64))
    tensor(8.3178)
    """
    if not callable(loss):
        raise TypeError(f"{NAME}: loss has type {type(loss).__name__}; it takes a function")
    checks.ndim(NAME, 2, x=x)
    checks.flag(NAME, return_entropy=return_entropy)
    groups = x.shape[0]
    if groups == 0:
        raise ValueError(f"{NAME}: x has shape {tuple(x.shape)}; it takes at least one group")
    checks.shape(NAME, "target", target, tuple(x.shape[:-1]), "that of x without its last dimension")
    for place, tensor in enumerate(inputs):
        if tensor is not None and tuple(tensor.shape[:1]) != (groups,):
            raise ValueError(
                f"{NAME}: input {place} has shape {tuple(tensor.shape)}; it takes ({groups}, ...), a row per group"
            )
    call = _Call(
        loss,
        target,
        tuple(None if tensor is None else tensor.detach() for tensor in inputs),
        {
            "temperature": temperature,
            "softcap": softcap,
            "ignore_index": ignore_index,
            "return_entropy": return_entropy,
            "accum_dtype": accum_dtype,
            "memory_budget": memory_budget,
        },
        [],
    )
    if not _at_once(x, linear_weight, bias):
        return call.of_logprobs(call.logprobs(x, linear_weight, target, bias))
    return call.like_the_loss(_Gradients.apply(call, x, linear_weight, bias))  # pyright: ignore


class _Call(NamedTuple):
    """A call. `kind` gets the type of tuple that the loss returns, or Tensor."""

    loss: Callable[..., Any]
    target: Tensor
    inputs: tuple[Tensor | None, ...]
    options: dict[str, Any]
    kind: list[type]

    def logprobs(
        self, x: Tensor, linear_weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any
    ) -> tuple[Tensor, ...]:
        """Log-probabilities, and on request entropies, of target's shape."""
        flat = x.flatten(0, -2), linear_weight, target.flatten(), bias
        output = fused_linear_token_logprobs(*flat, **{**self.options, **options})
        fields = (output,) if isinstance(output, Tensor) else (output.logprobs, output.entropy)
        return tuple(field.view(target.shape) for field in fields if field is not None)

    def of_group(self, group: int, fields: Sequence[Tensor]) -> tuple[Any, ...]:
        """The values that the loss returns for a group: from `fields`, the group's log-probabilities and maybe entropies."""
        logprobs = TokenLogprobsOutput(fields[0], fields[1], None, None) if len(fields) > 1 else fields[0]
        returned = self.loss(logprobs, *(None if tensor is None else tensor[group] for tensor in self.inputs))
        parts: tuple[Any, ...] = tuple(returned) if issubclass(type(returned), tuple) else (returned,)
        if not parts or not isinstance(parts[0], Tensor) or parts[0].dim() > 0:
            shown = f"shape {tuple(parts[0].shape)}" if parts and isinstance(parts[0], Tensor) else f"{returned!r}"
            raise ValueError(f"{NAME}: the loss returned {shown}; it returns a scalar, or a tuple that starts with one")
        self.kind[:] = [type(returned)]
        return parts

    def of_logprobs(self, fields: Sequence[Tensor]) -> Any:
        """The loss of all groups, from `fields`, their log-probabilities and maybe entropies."""
        rows = [self.of_group(group, [field[group] for field in fields]) for group in range(len(fields[0]))]
        return self.like_the_loss(_joined(rows))

    def like_the_loss(self, parts: Sequence[Any]) -> Any:
        """The parts as the loss returns them."""
        (kind,) = self.kind
        return parts[0] if issubclass(kind, Tensor) else tuple(parts) if kind is tuple else kind(*parts)


def _joined(rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The sum of the losses; of the others, all groups'."""
    first, *others = zip(*rows, strict=True)
    total = torch.stack(first).sum()
    return [total, *(None if parts[0] is None else torch.stack([part.detach() for part in parts]) for parts in others)]


def _at_once(x: Tensor, linear_weight: Tensor, bias: Tensor | None) -> bool:
    """Whether forward computes the gradients: if it can differentiate, and no hook moves a group's saved tensors."""
    if torch_state.compiling() or not (torch.is_grad_enabled() and linear_weight.requires_grad):
        return False
    tensors = x, linear_weight, bias
    if any(type(t) not in (Tensor, torch.nn.Parameter, type(None)) for t in tensors):
        return False
    if torch_state.recording() is not None or torch_state.transforming(tensors) is not None:
        return False
    hooks = recompute.innermost()
    lean_hooks = recompute.lean_hooks_of(hooks)
    return hooks is None or (lean_hooks is not None and lean_hooks.outer is None)


class _Gradients(torch.autograd.Function):
    """The loss of all groups and, in forward, its gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, linear_weight: Tensor, bias: Tensor | None) -> Any:
        needs = ctx.needs_input_grad[1:]
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
        accum_dtype = torch.float64 if x.dtype is torch.float64 else call.options["accum_dtype"]
        sums = tuple(
            torch.zeros(t.shape, dtype=accum_dtype, device=x.device) if t is not None and need else None
            for t, need in zip((linear_weight, bias), needs[1:], strict=True)
        )
        budget = call.options["memory_budget"]
        if budget is None:
            budget = most_statistics_memory(call.target[0].numel(), linear_weight.shape[0], x.dtype)
        rows, factors = list[tuple[Any, ...]](), list[Tensor]()
        for group in range(x.shape[0]):
            with torch.enable_grad():
                inputs = [
                    None if t is None else t.detach().requires_grad_(need)
                    for t, need in zip((x[group], linear_weight, bias), needs, strict=True)
                ]
                hidden, weight, added = inputs
                assert hidden is not None
                assert weight is not None
                fields = call.logprobs(hidden, weight, call.target[group], added, memory_budget=budget)
                leaves = [field.detach().requires_grad_() for field in fields]
                parts = call.of_group(group, leaves)
                if group == 0:
                    _check_depends_on(leaves, parts[0])
            rows.append(tuple(part.detach() if isinstance(part, Tensor) else part for part in parts))
            incoming = _incoming(parts[0], leaves)
            power = _power_above(incoming)
            factors.append(power)
            differentiable = [t for t, need in zip(inputs, needs, strict=True) if t is not None and need]
            scaled: list[Any] = [None if g is None else g / power for g in incoming]
            grads = iter(torch.autograd.grad(fields, differentiable, scaled))
            if dx is not None:
                dx[group] = next(grads)
            for total in sums:
                if total is not None:
                    total.addcmul_(next(grads), power.to(total.dtype))
            del fields, grads
        ctx.save_for_backward(dx, torch.cat(factors), *sums)
        ctx.dtypes = [None if t is None else t.dtype for t in (linear_weight, bias)]
        ctx.set_materialize_grads(False)
        loss, *others = _joined(rows)
        ctx.mark_non_differentiable(*[other for other in others if other is not None])
        return loss, *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dloss, *_ = grads
        if dloss is None:
            return None, None, None, None
        dx, factors, *sums = ctx.saved_tensors
        with torch.no_grad():
            if dx is not None:
                factors = (factors * dloss).view(-1, *[1] * (dx.dim() - 1))
                dx = torch.mul(dx, factors, out=torch.empty_like(dx))
            gradients = [dx]
            for total, dtype in zip(sums, ctx.dtypes, strict=True):
                gradients.append(
                    None if total is None else torch.mul(total, dloss, out=torch.empty_like(total, dtype=dtype))
                )
        if torch.is_grad_enabled():
            return None, *without_second_derivatives(NO_DOUBLE, gradients, (dloss,))
        return None, *gradients


def _incoming(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of log-probabilities and entropies; zeros if the loss depends on none of them."""
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    return grads if any(g is not None for g in grads) else [torch.zeros_like(leaf) for leaf in leaves]


def _power_above(gradients: Sequence[Tensor | None]) -> Tensor:
    """A power of two above all of them, ``[1]``; 1 if they are all 0, or if one is infinite or NaN."""
    flat = torch.cat([g.flatten() for g in gradients if g is not None])
    largest = flat.abs().amax().view(1) if flat.numel() else flat.new_zeros(1)
    exponent = torch.frexp(largest.masked_fill(~largest.isfinite(), 0.0)).exponent.clamp(-126, 127)
    return torch.ldexp(torch.ones_like(largest), exponent)


def _check_depends_on(leaves: Sequence[Tensor], loss: Tensor) -> None:
    """The loss depends on no other tensor that requires a gradient, or ValueError: such a tensor would get none."""
    leaf_ids = {id(leaf) for leaf in leaves}
    seen, left = set[Any](), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        source = getattr(node, "variable", None)
        if source is not None and id(source) not in leaf_ids:
            raise ValueError(
                f"{NAME}: the loss depends on a tensor of shape {tuple(source.shape)} that requires a gradient; it takes "
                "x, linear_weight and bias alone as sources of gradients, so detach the other"
            )
        left += [before for before, _ in node.next_functions]
