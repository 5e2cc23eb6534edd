"""SwiGLU of rows that are a multiple of 16."""

from torch import Tensor
from torch.nn import functional as F

from liger_core import swiglu
from liger_core.contract import Needs, Saved, implements


@implements(swiglu)
def forward(
    needs: Needs, gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
) -> tuple[Tensor, Saved]:
    y = F.silu(gate.float() * gate_multiplier) * up.float() * down_multiplier
    return y.to(gate.dtype).contiguous(), (gate, up) if any(needs) else ()


def backward(
    needs: Needs, saved: Saved, dy: Tensor, *, gate_multiplier: float, down_multiplier: float
) -> tuple[Tensor | None, ...]:
    gate, up = saved
    scaled, g = gate.float() * gate_multiplier, dy.float() * down_multiplier
    s = scaled.sigmoid()
    dgate = g * up.float() * s * (1 + scaled * (1 - s)) * gate_multiplier
    dup = g * scaled * s
    return dgate.to(gate.dtype) if needs[0] else None, dup.to(up.dtype) if needs[1] else None


def refuses(gate: Tensor, up: Tensor, *, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> str | None:
    return f"last dimension {gate.shape[-1]} is not a multiple of 16" if gate.shape[-1] % 16 else None
