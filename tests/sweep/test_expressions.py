"""Formulas over parameters: what they come to, and that they can do nothing else."""

import re
from typing import Any

import pytest
from tables import one_test

from roxxel_dist.sweep.space.constraints import Expression

VALUES: dict[str, Any] = {"dim": 96, "kv_heads": 2, "use_moe": True, "pos": "rope", "lr": 0.5, "max": 128}


@one_test(
    ("text", "value"),
    [
        ("dim // 8", 12),
        ("dim % kv_heads == 0", True),
        ("-dim + 2 * 3 - 1 / 4", -90.25),
        ("use_moe and dim > 64", True),
        ("not use_moe or lr < 0.1", False),
        ("'a' if use_moe else 'b'", "a"),
        ("pos in ['rope', 'none']", True),
        ("pos not in ('rope', 'none')", False),
        ("1 < kv_heads <= 2", True),
        ("1 < kv_heads < 2", False),
        ("max(dim, 100) + int(lr * 3)", 101),
        ("use_moe and pos == 'x' and 1 / 0", False),
        ("round(dim, -999999999)", 0),
        ("max(max, dim)", 128),
        ("kv_heads in (1, 2)", True),
    ],
)
def test_what_a_formula_comes_to(text: str, value: Any) -> None:
    assert Expression(text)(VALUES) == value


def test_its_parameters_are_known() -> None:
    assert Expression("max(dim, 100) % kv_heads if use_moe else lr").names == {"dim", "kv_heads", "use_moe", "lr"}


@one_test(
    "text",
    [
        "__import__('os').system('true')",
        "open('x')",
        "dim.__class__",
        "(lambda: 1)()",
        "[one for one in pos]",
        "values['dim']",
        "dim ** 99999",
        "1 << 99999",
        "max(dim, key=lr)",
        "f'{dim}'",
        "b'x'",
        "dim := 3",
        "import os",
        "",
        "dim dim",
        "-" * 1500 + "1",
        "not " * 400 + "1",
        "(" * 300 + "1" + ")" * 300,
    ],
)
def test_nothing_else_is_a_formula(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text.strip()))):
        Expression(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dims // 8", "no parameter 'dims'"),
        ("dim // 0", "for dim 96"),
        ("pos + dim", "for dim 96, pos 'rope'"),
        ("pos * (dim * 100000)", "something that long"),
    ],
)
def test_what_cannot_be_worked_out_is_told(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Expression(text)(VALUES)


def test_a_formula_has_an_end() -> None:
    with pytest.raises(ValueError, match="a formula of 20,001 characters: 2,000 are the maximum"):
        Expression("-" * 20_000 + "1")
