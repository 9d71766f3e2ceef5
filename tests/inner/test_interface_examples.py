"""The examples in the docstrings of the interfaces do what they show."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    ["inner.data.shards", "inner.data.sources.documents", "inner.data.tokenizer", "inner.params"],
)
def test_interface_example(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module), raise_on_error=True)
    assert results.attempted > 0
