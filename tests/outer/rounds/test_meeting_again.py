"""Islands that go on from checkpoints wait for one another: none trains before it holds the newest
state of all.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from outer.config import OuterConfig
from outer.errors import OuterError
from outer.membership.base import Member
from outer.network.retry import WallClock
from outer.rounds import agreed
from outer.rounds.leader import wait_for_donors
from tests.outer.islands import GUARD_SECONDS, Island, run_islands
from tests.outer.nets import member

Saved = tuple[dict[str, torch.Tensor], dict[str, Any]]


def config(num_islands: int, **changes: Any) -> OuterConfig:
    return OuterConfig(
        start_islands=num_islands, transport="loopback", wait_seconds=GUARD_SECONDS, **changes
    )


def run_and_save(names: str, rounds: dict[str, int]) -> dict[str, Saved]:
    """Checkpoints of islands that have made three rounds together, each after its own number of
    rounds.
    """
    saved: dict[str, Saved] = {}

    def script(island: Island) -> None:
        island.outer.begin()
        for number in range(1, 4):
            island.round()
            if number == rounds[island.name]:
                tensors, facts = island.outer.save()
                saved[island.name] = (
                    {name: values.clone() for name, values in tensors.items()},
                    facts,
                )

    run_islands(dict.fromkeys(names, script), config(len(names)))
    return saved


def restore(island: Island, saved: Saved) -> None:
    tensors, facts = saved
    room = island.outer.allocate(tensors)
    for name, values in room.items():
        values.copy_(tensors[name])
    island.outer.restore(room, facts)
    island.outer.replica.take_over()


def wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + GUARD_SECONDS / 2
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.01)


def test_an_island_that_has_taken_a_newer_state_still_waits_for_the_one_that_holds_the_newest() -> (
    None
):
    saved = run_and_save("abc", {"a": 1, "b": 2, "c": 3})
    islands: dict[str, Island] = {}
    has_come, has_begun = threading.Event(), threading.Barrier(3)

    def script(island: Island) -> tuple[int, str, bool]:
        if island.name == "c":
            # b can give its state before all have come, and a takes it.
            wait_until(
                lambda: "a" in islands and islands["a"].outer.position.round == 2,
                "a takes the state of b",
            )
            time.sleep(0.5)
            has_come.set()
        restore(island, saved[island.name])
        islands[island.name] = island
        entered_at = island.outer.begin().round
        found = entered_at, island.outer.digest, has_come.is_set()
        has_begun.wait(GUARD_SECONDS)
        return found

    found = run_islands(dict.fromkeys("abc", script), config(3))
    assert found == dict.fromkeys("abc", (3, saved["c"][1]["digest"], True))


def test_an_island_that_comes_while_donors_are_looked_for_is_looked_at_before_the_wait_ends() -> (
    None
):
    come: list[Member] = []

    def find_donors() -> list[Member]:
        found = list(come)
        come.append(member("c"))
        return found

    assert wait_for_donors(find_donors, WallClock(), GUARD_SECONDS, is_hopeless=lambda: bool(come))


def test_an_island_that_comes_back_to_a_run_that_goes_on_does_not_wait_for_one_that_is_gone() -> (
    None
):
    saved = run_and_save("abc", {"a": 1, "b": 1, "c": 1})
    goes_on, is_back = threading.Event(), threading.Event()

    def stays(island: Island) -> None:
        restore(island, saved[island.name])
        island.outer.begin()
        island.round()
        goes_on.set()
        wait_until(is_back.is_set, "the return of a")

    def comes_back(island: Island) -> int:
        wait_until(goes_on.is_set, "a round of b")
        patch.setattr(agreed, "RESUME_SECONDS", 2 * GUARD_SECONDS)
        restore(island, saved[island.name])
        entered_at = island.outer.begin().round
        is_back.set()
        return entered_at

    with pytest.MonkeyPatch.context() as patch:
        # b waits in vain for the others; a would wait longer than the test lasts.
        patch.setattr(agreed, "RESUME_SECONDS", 1.0)
        assert run_islands({"a": comes_back, "b": stays}, config(3))["a"] == 2


def test_a_joiner_goes_on_from_its_checkpoint_together_with_others_but_not_alone() -> None:
    saved = run_and_save("ab", {"a": 2, "b": 2})
    has_begun = threading.Barrier(2)

    def joins(island: Island) -> int:
        assert isinstance(island.outer.averager, agreed.AgreedAverager)
        island.outer.averager._joins = True
        restore(island, saved[island.name])
        entered_at = island.outer.begin().round
        has_begun.wait(GUARD_SECONDS)
        return entered_at

    assert run_islands(dict.fromkeys("ab", joins), config(2)) == dict.fromkeys("ab", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreed, "RESUME_SECONDS", 0.5)
        with pytest.raises(OuterError, match="this island joins a run"):
            run_islands({"a": joins}, config(2))


@pytest.mark.parametrize(("has_proof", "entered_at"), [(True, 3), (False, 0)])
def test_a_checkpoint_keeps_the_certificate_with_which_one_island_convinces_a_fresh_one(
    has_proof: bool, entered_at: int
) -> None:
    tensors, facts = run_and_save("ab", {"a": 3, "b": 3})["a"]
    facts = (
        facts if has_proof else {name: value for name, value in facts.items() if name != "proof"}
    )
    has_begun, has_entered = threading.Event(), threading.Event()

    def resumes(island: Island) -> int:
        restore(island, (tensors, facts))
        found = island.outer.begin().round
        has_begun.set()
        has_entered.wait(GUARD_SECONDS)
        return found

    def joins(island: Island) -> int:
        has_begun.wait(GUARD_SECONDS)
        assert isinstance(island.outer.averager, agreed.AgreedAverager)
        island.outer.averager._joins = has_proof  # Then it waits until a donor has shown its proof.
        found = island.outer.begin().round
        has_entered.set()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            agreed, "RESUME_SECONDS", 0.5
        )  # The other island that was in the run does not come.
        found = run_islands({"a": resumes, "c": joins}, config(1, quorum=2))
    assert found == {"a": 3, "c": entered_at}
