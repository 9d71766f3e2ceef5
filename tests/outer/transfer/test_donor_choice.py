"""Whom a joiner asks for a state, try after try, and whom it gives up."""

import time

from outer.membership.base import Member
from outer.transfer import donor_choice
from outer.transfer.donor_choice import MAX_ASKED, TRIES, DonorChoice
from tests.outer.donors import member


def choice_of(*names: str) -> tuple[DonorChoice, list[str], list[str]]:
    """A choice among these islands, and the names that it disbelieves and believes."""
    donors, disbelieved, believed = [member(name, ["address"]) for name in names], [], []

    def note(kept: list[str]):
        return lambda given: kept.extend(donor.island for donor in given)

    return (
        DonorChoice(lambda: donors, time.monotonic, note(disbelieved), note(believed)),
        disbelieved,
        believed,
    )


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


def test_after_a_wrong_state_donors_are_asked_one_by_one_so_that_only_the_liar_is_given_up() -> (
    None
):
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


def test_of_many_islands_a_try_asks_some_and_the_next_one_twice_as_many_others_first() -> None:
    choice, _, _ = choice_of(*(f"island-{number}" for number in range(100)))
    first = names(choice.next())
    choice.has_failed(is_wrong=False)
    second = names(choice.next())
    assert (len(first), len(second)) == (MAX_ASKED, 2 * MAX_ASKED) and not set(first) & set(second)


def test_joiners_ask_different_islands_of_many() -> None:
    donors = [member(f"island-{number}", ["address"]) for number in range(1000)]
    asked = [
        names(DonorChoice(lambda: donors, time.monotonic, spread=joiner).next())
        for joiner in ("a", "b")
    ]
    assert set(asked[0]) != set(asked[1])


def test_among_many_islands_of_which_none_gives_anything_a_joiner_gives_up_after_few_tries() -> (
    None
):
    choice, disbelieved, _ = choice_of(*(f"island-{number}" for number in range(1000)))
    tries = 0
    while choice.next():
        choice.has_failed(is_wrong=False)
        tries += 1
    assert tries <= 10 and len(disbelieved) == 1000
