"""A block that fits, in float32, unless the compiler makes two buffers of it."""

from liger_bent_ascend.ops._double import launch


def forward(needs, x, **others):
    return launch(x, 48, 32768)


def backward(needs, saved, *incoming, **options):
    return ()
