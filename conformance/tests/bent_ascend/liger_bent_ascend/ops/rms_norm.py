"""More programs than a launch takes."""

from liger_bent_ascend.ops._double import launch


def forward(needs, x, **others):
    return launch(x, 65536, 1024)


def backward(needs, saved, *incoming, **options):
    return ()
