"""An island that was behind and finds nobody ahead any more trains on from its own state."""

import threading
from collections.abc import Callable

import pytest
import torch

from outer.hooks import NoHooks
from outer.network.endpoints import Endpoint
from outer.report import RoundReport
from outer.transports.loopback import Hub
from tests.outer.agreement.test_quorum import Trainee, layered, until
from tests.outer.agreement.test_quorum import config as quorum_config
from tests.outer.islands import GUARD_SECONDS, Island, run_islands
from tests.outer.test_loop import config, rounds


class DieGiving(NoHooks):
    """The islands are lost to the others as soon as one of those asks for a part of their state."""

    def __init__(self, hub: Hub, names: str) -> None:
        self._hub, self._names = hub, names
        self.have_died = threading.Event()

    def reached(self, phase: str, round_number: int) -> None:
        if phase == "donate":
            for name in self._names:
                self._hub.lose(name)
            self.have_died.set()


async def refuse(source: Endpoint, body: bytes) -> bytes:
    return b"gone\n"


def give_nothing(island: Island) -> None:
    assert island.network is not None
    island.network.messenger.serve("part", refuse)


def give(island: Island) -> None:
    """Give the state, until they die."""


FIRSTS: dict[str, Callable[[Island], None]] = {
    "they die while they give it": give,
    "they do not give it": give_nothing,
}


@pytest.mark.parametrize("case", FIRSTS)
def test_islands_that_cannot_get_the_state_ahead_of_them_commit_on_theirs_and_keep_their_progress(
    case: str,
) -> None:
    hub = Hub()
    hooks = dict.fromkeys("ad", DieGiving(hub, "ad") if FIRSTS[case] is give else NoHooks())
    are_ahead, are_done = threading.Barrier(4), threading.Barrier(4)

    def first(island: Island) -> None:
        island.outer.begin()
        for _ in range(2):
            island.round()
        FIRSTS[case](island)
        are_ahead.wait(GUARD_SECONDS)
        are_done.wait(GUARD_SECONDS)

    def late(island: Island) -> tuple[RoundReport, torch.Tensor]:
        # It announces itself only now, as one that was cut off.
        island.train(0)
        are_ahead.wait(GUARD_SECONDS)
        island.outer.averager.runner.leader.announce()
        island.outer.launch(100)
        report = island.outer.land().reports[-1]
        are_done.wait(GUARD_SECONDS)
        return report, island.params.flat()

    def undisturbed(island: Island) -> RoundReport:
        island.outer.begin()
        return island.round()

    found = run_islands(
        {"a": first, "b": late, "c": late, "d": first}, config(2, quorum=2), hub=hub, hooks=hooks
    )
    expected = run_islands(dict.fromkeys("bc", undisturbed), config(2))
    for name in "bc":
        report, _ = found[name]
        assert (report.round, report.participants) == (0, ["b", "c"])
        assert report.pseudo_grad_norm == expected[name].pseudo_grad_norm, (
            "its progress counts as it was"
        )
    assert torch.equal(found["b"][1], found["c"][1])


def test_islands_that_observe_commit_without_one_that_was_ahead_and_has_died() -> None:
    hub = Hub()
    fault, is_ahead = DieGiving(hub, "a"), threading.Event()

    def first(island: Island) -> None:
        trainee = Trainee(island)
        trainee.begin()
        until(trainee, 2)
        is_ahead.set()
        assert fault.have_died.wait(GUARD_SECONDS)

    def late(island: Island) -> list[str]:
        trainee = Trainee(island)
        assert is_ahead.wait(GUARD_SECONDS)
        island.outer.averager.runner.leader.announce()
        trainee.rounds.start()
        until(trainee, 2)
        return trainee.digests

    made = quorum_config(2, rounds=100, inner_steps=2).model_copy(update={"start_islands": 1})
    found = run_islands({"a": first, "b": late}, made, model=layered, hub=hub, hooks={"a": fault})
    assert len(found["b"]) == 2


def test_one_of_two_donors_that_sends_wrong_parts_is_found_out() -> None:
    together, taken = threading.Event(), threading.Event()

    def ahead(island: Island) -> str:
        rounds(2, island)
        if island.name == "a":
            # Whatever is asked for, it sends sound parts of a state that it does not describe.
            island.outer.replica.carried.parts[0].add_(1.0)
        together.set()
        assert taken.wait(GUARD_SECONDS)
        return island.outer.digest

    def late(island: Island) -> str:
        assert together.wait(GUARD_SECONDS)
        assert island.outer.begin().round == 2
        taken.set()
        return island.outer.digest

    found = run_islands({"a": ahead, "b": ahead, "c": late}, config(2))
    assert found["c"] == found["b"]
