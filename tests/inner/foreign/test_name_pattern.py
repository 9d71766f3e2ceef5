"""Patterns for names: what Python's `re` finds is found, and no pattern can hang."""

import re
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from inner.config.optimizer import ParamGroup
from inner.foreign.name_pattern import MAX_LENGTH, NamePattern

NAME = "layers.10.attention.q_proj.weight"
MANY = settings(derandomize=True, max_examples=150, deadline=None, database=None)

atoms = st.sampled_from(
    [
        "a",
        "b",
        ".",
        r"\.",
        r"\d",
        r"\w",
        r"\W",
        r"\D",
        r"\s",
        r"\S",
        "[ab]",
        "[^a]",
        "[a-c_]",
        r"[^\d.]",
        "1",
        "_",
        "",
    ]
)
edges = st.sampled_from(
    ["^", "$", r"\b", r"\B", r"\A", r"\Z", "(?=a)", "(?!b)", "(?<=a.)", "(?<!b)"]
)
repeats = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,3}", "*?", "+?", "{2,}"])


def longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    joined = st.lists(inner, min_size=1, max_size=3).map("".join)
    return joined | st.tuples(joined, joined, repeats).map(
        lambda three: f"({three[0]}|{three[1]}){three[2]}"
    )


patterns = st.recursive(
    atoms | edges | st.tuples(atoms.filter(bool), repeats).map("".join), longer, max_leaves=8
)


@MANY
@given(patterns, st.text("ab1._\n-", min_size=1, max_size=10))
def test_it_finds_what_re_finds(pattern: str, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = re.search(pattern, name) is not None
    except re.error:
        with pytest.raises(ValueError):
            NamePattern(pattern)
        return
    try:
        mine = NamePattern(pattern)
    except ValueError as error:
        assert "deep" in str(error)
        return
    assert mine.is_in(name) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        r"(\w+\.?)+x!",
        r"(a|a)*!|(\w|\w\w)+!",
        r"(.*.*)*.*.*.*.*!",
        "(?:l?a?y?e?r?s?)*!" + r"\w*" * 80,
        "(((.{2,}){2,}){2,}!|" * 6 + "!" + ")" * 6,
        r"((\w*\w*){1000}){1000}!",
        "a?" * 140 + "a" * 20,
        r"(?!(\w+\.?)+x!)z",
    ],
)
def test_a_pattern_that_tries_every_way_ends(pattern: str) -> None:
    start = time.process_time()
    assert not NamePattern(pattern).is_in(NAME + ".a" * 20)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(\w)\1", "groupref"),
        ("(?i)Layers", "flags"),
        ("(?i:Layers)", "flags"),
        ("(?>a)", "atomic_group"),
        ("a++", "possessive_repeat"),
        ("((((a+b)+c)+d)+e)+", "deep"),
        ("(" * 100 + ")" * 100, "deep"),
        ("a" * (MAX_LENGTH + 1), "301 characters"),
        ("(?<=a+)b", "fixed length"),
        ("(", "missing \\)"),
        ("a{99999999999999999999}", "too large"),
    ],
)
def test_what_is_not_computed_is_refused_with_its_reason(pattern: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=f"regular expression.*{reason}"):
        ParamGroup(pattern=pattern)
