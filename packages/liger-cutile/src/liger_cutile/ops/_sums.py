"""Several sums in one `ct.reduce`, so that the threads of a block wait for each other only once."""

import cuda.tile as ct


@ct.function
def add_two(a1, b1, a2, b2):
    return a1 + a2, b1 + b2


@ct.function
def add_three(a1, b1, c1, a2, b2, c2):
    return a1 + a2, b1 + b2, c1 + c2


@ct.function
def add_four(a1, b1, c1, d1, a2, b2, c2, d2):
    return a1 + a2, b1 + b2, c1 + c2, d1 + d2
