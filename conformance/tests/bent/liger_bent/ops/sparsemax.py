"""Host code that reads a result."""

import torch


def forward(needs, x, **options):
    y = torch.empty_like(x)
    return y * y.max().item(), ()


def backward(needs, saved, dy, **options):
    return ()
