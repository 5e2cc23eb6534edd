"""Another op's kernels, through the dispatcher."""

from liger_core import softmax


def forward(needs, log_pred, **others):
    return softmax(log_pred), ()


def backward(needs, saved, *incoming, **options):
    return ()
