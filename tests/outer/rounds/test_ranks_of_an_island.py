"""The outer loop of an island of several ranks, beside one of a single rank, as processes over
gloo.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from outer.config import OuterConfig
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.errors import OuterError
from outer.loop import build_loop
from outer.membership.rendezvous import serve_rendezvous
from outer.network.event_loop import EventLoopThread
from outer.space.ranks import RankGroup
from outer.transports.loopback import Hub
from tests.harness import run_ranks
from tests.outer.islands import (
    GUARD_SECONDS,
    FakeParams,
    Held,
    Island,
    Wrap,
    fails_in,
    identity_of,
    tensors,
)
from tests.outer.nets import key_of
from tests.outer.rounds.test_audited_rounds import lie
from tests.outer.streams import Stream, layered
from tests.outer.test_loop import TOKENS, assert_equal, reference

CONFIG = OuterConfig(transport="gloo", start_islands=2, wait_seconds=GUARD_SECONDS)
# Island a is process 0 and holds everything; b is the others, which share wq and hold one half of
# the rest each.
LAYOUTS = [
    None,
    [
        Held("embed", (6, 13), (0, 7)),
        Held("wq", (0, 5), (0, 3)),
        Held("wq", (0, 5), (3, 4)),
        Held("gain", (0, 1), (0, 1)),
    ],
    [Held("embed", (0, 6), (0, 7)), Held("wq", (0, 5), (0, 3)), Held("bias", (0, 9), (0, 1))],
]

# Of the second of three fragments, layer 1, the first rank of b holds nothing.
LAYERED = [
    None,
    [
        Held("embed", (0, 13), (0, 7)),
        Held("layers.0.w", (0, 6), (0, 5)),
        Held("head", (0, 3), (0, 13)),
    ],
    [
        Held("layers.1.w", (0, 4), (0, 9)),
        Held("layers.2.w", (0, 6), (0, 5)),
        Held("head", (3, 7), (0, 13)),
    ],
]


def on_island(
    process: int,
    script: Callable[[Island, int], object],
    address: str,
    fault: Wrap | None = None,
    config: OuterConfig = CONFIG,
) -> object:
    """Run `script` as one rank of island a or b; the last rank has the faulty transport."""
    groups = [dist.new_group([1, 2]) for _ in range(2)]
    name, rank, ranks = (
        ("a", 0, RankGroup()) if process == 0 else ("b", process - 1, RankGroup(*groups))
    )
    loop = EventLoopThread()
    settings = NetworkSettings(
        run_id="run", island=name, rank=rank, island_key=key_of(name), bootstrap=[address]
    )
    network = loop.run(open_network("gloo", settings), GUARD_SECONDS)
    if process == 2 and fault is not None:
        network.transport = fault(Hub(), network.transport)
    try:
        model, layouts = (tensors(), LAYOUTS) if config.fragments == 1 else (layered(), LAYERED)
        params = FakeParams(model, layouts[process])
        identity = identity_of(name)
        island = Island(name, params, build_loop(config, identity, params, ranks, network, loop))
        island.outer.begin()
        return script(island, rank)
    finally:
        dist.barrier()
        loop.run(network.close(), GUARD_SECONDS)
        loop.close()


def islands_of_ranks(
    script: Callable[[Island, int], object], fault: Wrap | None = None, config: OuterConfig = CONFIG
) -> list:
    rendezvous = serve_rendezvous("127.0.0.1", 0)
    try:
        return run_ranks(on_island, 3, script, rendezvous.address, fault, config)
    finally:
        rendezvous.close()


def train_whole(island: Island, round_number: int) -> None:
    """Progress of a round as an island of one rank makes it; this rank's slices of it."""
    whole = FakeParams({name: torch.zeros_like(values) for name, values in tensors().items()})
    names = [held.name for held in whole.slices]
    Island(island.name, whole, island.outer).train(round_number)
    for held, values in zip(island.params.slices, island.params.values, strict=True):
        values.add_(whole.values[names.index(held.name)][slice(*held.rows), slice(*held.cols)])


def test_islands_of_unequal_ranks_follow_the_reference_bit_for_bit() -> None:
    def script(island: Island, rank: int) -> tuple[list[str], list[torch.Tensor]]:
        digests, params = [], []
        for number in range(4):
            train_whole(island, number)
            digests.append(island.commit(TOKENS[island.name]).digest)
            params.append(island.params.flat())
        return digests, params

    expected = reference(["ab"] * 4, CONFIG.optimizer)
    found = islands_of_ranks(script)
    assert found[0][0] == found[1][0] == found[2][0]
    assert_equal(found[0][1], expected)
    for (_, params), layout in zip(found[1:], LAYOUTS[1:], strict=True):
        assert_equal(params, [sliced(flat, layout) for flat in expected])


def test_ranks_audit_each_other_and_find_the_one_that_lies() -> None:
    """In the second round the last rank of b sends wrong means of the parts that it carries."""

    def script(island: Island, rank: int) -> tuple[list[str], int, list[str]]:
        train_whole(island, 0)
        honest = island.commit(TOKENS[island.name])
        train_whole(island, 1)
        if (island.name, rank) == ("b", 1):
            lie(island)
        failed = island.attempt(TOKENS[island.name])
        return honest.participants, honest.audited, [failed.cause]

    found = islands_of_ranks(script, config=CONFIG.model_copy(update={"audit": 1.0}))
    assert [participants for participants, _, _ in found] == [["a", "b"]] * 3
    # Each of the parts was audited by the island that did not reduce it.
    assert found[0][1] > 0 and found[1][1] == found[2][1] > 0
    assert "island 'b' sent is not the mean of the payloads that it received" in found[0][2][0]


def sliced(flat: torch.Tensor, layout: list[Held]) -> torch.Tensor:
    """What a rank holds of the whole model's flat vector."""
    named = tensors()
    parts = flat.split([values.numel() for values in named.values()])
    whole = {
        name: part.view(values.shape)
        for part, (name, values) in zip(parts, named.items(), strict=True)
    }
    return FakeParams(whole, layout).flat()


@pytest.mark.slow
def test_all_ranks_end_a_timed_round_when_their_leaders_time_is_up() -> None:
    def script(island: Island, rank: int) -> list[int]:
        seconds, pace = [0.0], island.outer.pace
        # The second rank's own clock stands still, and would never end a round.
        pace._now = lambda: seconds[0] * (rank == 0)
        made = []
        for number in range(2):
            most, steps, is_over = island.outer.inner_steps(), 0, False
            while not is_over:
                steps, seconds[0] = steps + 1, seconds[0] + 1.0
                is_over = steps == most or bool(island.outer.interruption(most - steps))
            made.append(steps)
            train_whole(island, number)
            island.commit(TOKENS[island.name])
        return made

    config = CONFIG.model_copy(update={"local_steps": "timed", "round_seconds": 3.0})
    assert islands_of_ranks(script, config=config) == [[3, 3]] * 3


def test_an_attempt_that_fails_on_one_rank_is_aborted_by_all_and_the_next_commits() -> None:
    def script(island: Island, rank: int) -> tuple[list[bool], list[int], str]:
        train_whole(island, 0)
        island.commit()
        train_whole(island, 1)
        aborted = island.attempt(100)
        later = [island.commit(), island.commit()]
        return (
            [r.is_committed for r in (aborted, *later)],
            [r.attempt for r in (aborted, *later)],
            later[1].digest,
        )

    found = islands_of_ranks(script, fails_in(1))
    assert found[0][:2] == ([False, True, True], [0, 1, 0])
    assert found[0] == found[1] == found[2]


def test_a_fault_of_one_rank_ends_all_ranks_of_its_island_with_its_cause() -> None:
    def script(island: Island, rank: int) -> object:
        train_whole(island, 0)
        if island.name == "a":
            return island.commit().participants
        if rank == 1:
            island.params.values[0][0, 0] = torch.nan
        try:
            island.attempt(100)
        except OuterError as error:
            island.outer.leave()
            return str(error)
        return "nothing was raised"

    cause = "the pseudo-gradient of 'embed' holds nan"
    assert islands_of_ranks(script) == [["a"], cause, cause]


def stream(config: OuterConfig, island: Island, rank: int) -> tuple[list[str], torch.Tensor]:
    made = Stream(island, config)
    made.run(config.num_rounds)
    return [landing.reports[-1].digest for landing in made.landings], made.global_params()


@pytest.mark.parametrize(
    "changes", [{"delay": 2, "mix": 0.5}, {"delay": 2, "eager": True}, {"codec": "int8"}], ids=str
)
def test_fragments_that_a_rank_has_nothing_of_stream_as_in_an_island_of_one_rank(
    changes: dict,
) -> None:
    fields = {
        "transport": "gloo",
        "start_islands": 2,
        "wait_seconds": GUARD_SECONDS,
        "rounds": 2,
        "inner_steps": 7,
    }
    config = OuterConfig(**fields, fragments=3, **changes)
    whole, first, second = islands_of_ranks(partial(stream, config), config=config)
    assert whole[0] == first[0] == second[0] and len(whole[0]) == 6
    assert sorted(torch.cat([first[1], second[1]]).tolist()) == sorted(whole[1].tolist())
