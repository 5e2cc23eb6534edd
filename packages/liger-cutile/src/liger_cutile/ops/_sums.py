"""Several sums in one `ct.reduce`, so that the threads of a block wait for each other only once. Running sums of many values."""

import math

import cuda.tile as ct


@ct.function
def add_up(total, lost, values):
    """Running totals with more values, and what rounding has added to them, to be subtracted from the next values.

    Where many values are equal, they are rounded alike, and the error would grow with their number. Source: Kahan, Further
    Remarks on Reducing Truncation Errors, 1965.
    """
    values = values - lost
    result = total + values
    return result, ct.where(ct.abs(result) < math.inf, (result - total) - values, 0.0)


@ct.function
def add_two(a1, b1, a2, b2):
    return a1 + a2, b1 + b2


@ct.function
def add_three(a1, b1, c1, a2, b2, c2):
    return a1 + a2, b1 + b2, c1 + c2


@ct.function
def add_four(a1, b1, c1, d1, a2, b2, c2, d2):
    return a1 + a2, b1 + b2, c1 + c2, d1 + d2
