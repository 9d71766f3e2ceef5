"""All inputs that are kept are decoded or refused as they should be, as are those that our own
encoders make.
"""

import pytest

pytest.importorskip("hivemind")

from tests.fuzz.corpus import kept_inputs
from tests.fuzz.entries import Entries, seeds_of, split
from tests.fuzz.groups import GROUPS
from tests.fuzz.judge import judge


@pytest.fixture(scope="module", params=GROUPS)
def group(request: pytest.FixtureRequest) -> tuple[str, Entries]:
    """(name, its entries)"""
    return request.param, GROUPS[request.param]()


def test_every_decoder_accepts_what_an_honest_island_sends(group: tuple[str, Entries]) -> None:
    for name, entry in group[1].items():
        outcomes = [judge(entry, seed) for seed in entry.seeds]
        assert ("decoded" in outcomes) is not entry.is_refused, (name, outcomes)


def test_every_kept_input_is_decoded_or_refused_soon_and_small(group: tuple[str, Entries]) -> None:
    name, entries = group
    inputs = kept_inputs(name)
    assert inputs, f"no inputs of {name} are kept: python -m tests.fuzz {name} --keep"
    for data in [*inputs, *seeds_of(entries)]:
        entry, body = split(entries, data)
        try:
            judge(entries[entry], body)
        except Exception as error:
            raise AssertionError(f"{entry} of {name}: {data!r}") from error
