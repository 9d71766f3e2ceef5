"""What tests of the fuzzers share."""

from collections.abc import Iterator

import pytest

from tests.fuzz.loop import end_threads


@pytest.fixture(autouse=True, scope="module")
def no_threads_are_left() -> Iterator[None]:
    """The fuzzers' loop has no threads when a file of tests is done."""
    yield
    end_threads()
