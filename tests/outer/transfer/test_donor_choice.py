"""Whom a joiner asks for a state, try after try, and whom it gives up."""

import time

from outer.membership.base import Member
from outer.transfer import donor_choice
from outer.transfer.donor_choice import TRIES, DonorChoice
from tests.outer.donors import member


def choice_of(*names: str) -> tuple[DonorChoice, list[str], list[str]]:
    """A choice among these islands, and the names that it disbelieves and believes."""
    donors, disbelieved, believed = [member(name, ["address"]) for name in names], [], []

    def note(kept: list[str]):
        return lambda given: kept.extend(donor.island for donor in given)

    return DonorChoice(lambda: donors, time.monotonic, note(disbelieved), note(believed)), disbelieved, believed


def names(donors: list[Member]) -> list[str]:
    return [donor.island for donor in donors]


def test_islands_that_give_nothing_are_given_up_after_some_tries() -> None:
    choice, disbelieved, _ = choice_of("a", "b")
    for _ in range(TRIES):
        assert names(choice.next()) == ["a", "b"] and not disbelieved
        choice.has_failed(is_wrong=False)
    assert disbelieved == ["a", "b"] and choice.next() == []


def test_one_try_that_takes_long_is_enough(monkeypatch) -> None:
    monkeypatch.setattr(donor_choice, "TRY_SECONDS", 0.0)
    choice, disbelieved, _ = choice_of("a")
    choice.next()
    choice.has_failed(is_wrong=False)
    assert disbelieved == ["a"] and choice.next() == []


def test_after_a_wrong_state_donors_are_asked_one_by_one_so_that_only_the_liar_is_given_up() -> None:
    choice, disbelieved, believed = choice_of("a", "b")
    choice.next()
    choice.has_failed(is_wrong=True)
    assert names(choice.next()) == ["a"]
    choice.has_failed(is_wrong=True)
    assert names(choice.next()) == ["b"]
    choice.has_given()
    assert (disbelieved, believed) == ([], ["b"])


def test_who_leaves_and_who_comes_is_seen_at_each_try() -> None:
    now = ["a"]
    choice = DonorChoice(lambda: [member(name, ["address"]) for name in now], time.monotonic)
    assert names(choice.next()) == ["a"]
    now[:] = ["b"]
    assert names(choice.next()) == ["b"]
    now.clear()
    assert choice.next() == []
