"""No kernel at all: the reference."""

from liger_core import jsd


def forward(needs, **arguments):
    return jsd.reference(**arguments), ()


def backward(needs, saved, *incoming, **options):
    return ()
