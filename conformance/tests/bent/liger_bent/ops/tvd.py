"""A kernel that refuses."""


def forward(needs, **arguments):
    raise AssertionError("it refuses")


def backward(needs, saved, *incoming, **options):
    raise AssertionError("it refuses")


def refuses(**arguments):
    return "it is not written"
