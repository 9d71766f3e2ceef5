"""The examples in the docstrings of the interfaces between islands, which run over loopback."""

import doctest
import importlib

import pytest

MODULES = (
    "outer.agreement",
    "outer.leases.ranges",
    "outer.codecs.base",
    "outer.hooks",
    "outer.merges.base",
    "outer.network.endpoints",
    "outer.network.messages",
    "outer.network.retry",
    "outer.transports.base",
    "outer.membership.base",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_an_interface_run(name):
    results = doctest.testmod(importlib.import_module(name), raise_on_error=True)
    assert results.attempted > 0
