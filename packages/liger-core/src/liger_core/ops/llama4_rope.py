"""Rotary position embedding that pairs neighbouring columns."""

import torch
from torch import Tensor

from liger_core import checks
from liger_core.checks import FLOATS
from liger_core.contract import Recompute, op, upcast


@op(
    differentiable=("q", "k"),
    dimensions="q: b s h D, k: b s h' D, freqs_cis: s * -> b s h D, b s h' D",
    recompute=Recompute("freqs_cis"),
)
def llama4_rope(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply each pair of neighbouring columns, as a complex number, by its frequency, another complex number.

    y₂ᵢ = x₂ᵢ·a − x₂ᵢ₊₁·b and y₂ᵢ₊₁ = x₂ᵢ·b + x₂ᵢ₊₁·a, where a and b are the real and imaginary part of freqs_cis at the
    token's position and i. Computed in float32 and rounded once.

    Args:
        q: ``[B, S, Hq, D]``, D even; float32, bfloat16 or float16.
        k: ``[B, S, Hk, D]``; it may have another dtype than q.
        freqs_cis: complex64 ``[S, D/2]``, or its real and imaginary parts ``[S, D/2, 2]`` in any floating dtype. All
            samples of the batch share them. No gradient.

    Returns:
        The rotated ``(q, k)``, each in its own dtype.

    Raises:
        TypeError: a dtype or type that is not accepted.
        ValueError: shapes that don't fit together, or tensors on different devices.

    Source:
        Su et al., RoFormer, arXiv 2104.09864, with the pairing of columns of the Llama 4 model.

    >>> x = torch.tensor([1.0, 2.0]).view(1, 1, 1, 2)
    >>> llama4_rope(x, x, torch.tensor([[1j]]))[0].flatten()
    tensor([-2.,  1.])
    """
    freqs = freqs_cis.detach()
    if freqs.is_complex():
        freqs = torch.view_as_real(freqs.resolve_conj())
    real, imaginary = upcast(freqs).unsqueeze(1).unbind(-1)
    return _rotate(q, real, imaginary), _rotate(k, real, imaginary)


def _rotate(x: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    even, odd = torch.unflatten(upcast(x), -1, (-1, 2)).unbind(-1)
    y = torch.stack((even * real - odd * imaginary, even * imaginary + odd * real), -1)
    return y.flatten(-2).to(x.dtype)


@llama4_rope.checks
def _(q: Tensor, k: Tensor, freqs_cis: Tensor) -> None:
    checks.floating("llama4_rope", q=q, k=k)
    checks.dtypes("llama4_rope", (torch.complex64, *FLOATS), freqs_cis=freqs_cis)
    checks.ndim("llama4_rope", 4, 4, q=q, k=k)
    batch, length, _, head = q.shape
    if head % 2 or head == 0:
        raise ValueError(f"llama4_rope: q has head size {head}; it takes an even one")
    checks.shape("llama4_rope", "k", k, (batch, length, k.shape[2], head), "q's batch, sequence and head size")
    expected = (length, head // 2) if freqs_cis.is_complex() else (length, head // 2, 2)
    checks.shape("llama4_rope", "freqs_cis", freqs_cis, expected, "q's sequence and half its head size")
