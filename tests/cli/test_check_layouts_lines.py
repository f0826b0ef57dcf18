"""The lines of check-layouts: what is most wrong comes first, and a ratio shows that it is not 1."""

import pytest
from tables import one_test

from roxxel_dist.cli.audit import _lines
from roxxel_dist.layouts.check import LayoutResult
from roxxel_dist.layouts.compare import Difference


def difference(what, ratio=1.0, share=1.0, *, number=False):
    return Difference(
        what=what, ratio=ratio, angle_deg=0.0, share=share, distance=1.0, bound=0.0, is_number=number, meaning="why"
    )


def lines(*differences):
    return _lines(LayoutResult(layout="rows", text="over 8", status="differs", differences=differences))


# Gradients in the order of the backward pass, with the share that they are wrong by -> the order of the lines.
ORDERS = [
    ([("o.bias", 0.004), ("o.kernel", 0.53), ("wo", 1.01), ("wi", 0.99), ("e", 0.44)], ["wo", "wi", "o.bias"]),
    ([("o.bias", 1.0), ("wo", 1.0), ("wi", 1.0)], ["o.bias", "wo", "wi"]),
    ([("o.bias", 0.01), ("wo", 0.001)], ["o.bias", "wo"]),
    ([("o.bias", float("inf")), ("wo", 2.0)], ["o.bias", "wo"]),
    ([("o.bias", float("inf"))], ["o.bias"]),
]


@pytest.mark.parametrize(("shares", "order"), ORDERS)
def test_the_gradient_that_is_most_wrong_comes_first(shares, order):
    found = lines(*(difference(f"gradient of {name}", 1.5, share) for name, share in shares))
    assert found[1].startswith(f"  gradient of {order[0]}: ")
    assert len(order) == 1 or ", ".join(order[1:]) in found[2]


@one_test(
    ("ratio", "shown"),
    [
        (8.0, "8 x"),
        (0.5, "0.5 x"),
        (1.00002, "1.00002 x"),
        (1.0000000042, "1.000000004 x"),
        (0.99999997, "0.99999997 x"),
        (1.09999999, "1.1 x"),
        (-1.0, "-1 x"),
        (0.0, "0 x"),
    ],
)
def test_a_ratio_shows_that_it_is_not_one(ratio, shown):
    assert lines(difference("loss", ratio, number=True))[1] == f"  loss: {shown}: why"
