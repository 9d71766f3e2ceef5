"""A joiner downloads its state from donors that continue to commit rounds, over real sockets."""

import asyncio
import time
from typing import Any

import pytest
import torch

import outer.network.deadlines
import outer.transfer.donor
import outer.transfer.download
from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.config import OuterOptimizerConfig
from outer.network.endpoints import Endpoint, Messenger, Traffic
from outer.space.layout import Space
from outer.state.global_state import GlobalState
from outer.state.part_state import Position
from outer.transfer.donor import Donor
from outer.transfer.download import Download
from outer.transfer.download_plan import DownloadPlan
from tests.outer.donors import (
    DEFAULTS,
    NUM_PARTS,
    SPACE,
    Run,
    Spec,
    Watched,
    enter_state,
    member,
    tcp,
    with_run,
)
from tests.outer.nets import run, swarm


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_state_fetched_while_rounds_go_on_is_that_of_an_island_that_was_there(
    codec: str, momentum: float
) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        for name in ("a", "b"):
            await here.enter(name)
        here.commit()
        watched = Watched(
            messenger, lambda number: here.commit() if number % 8 == 0 and here.round < 6 else None
        )
        download = here.download(watched)
        await download.run(1)
        assert len({state.round for state in download.parts.values()}) > 1
        await enter_state(here, download)
        while here.round < 6:
            here.commit()
        assert await download.catch_up(6) == 6
        assert download.digests() == here.islands[0].digests
        joiner = await here.enter("joiner")
        joiner.states[0].replace(download.parts, here.islands[0].states[0].position)
        here.commit()
        assert joiner.digest == here.islands[0].digest == here.islands[1].digest

    with_run(test, codec=codec, config=OuterOptimizerConfig(momentum=momentum))


def test_parts_are_brought_up_by_means_not_taken_twice() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        here.commit()
        watched = Watched(messenger)
        download = here.download(watched)
        await download.run(1)
        here.commit()
        assert await download.catch_up(2) == 2
        assert (watched.num("part"), watched.num("mean")) == (NUM_PARTS, NUM_PARTS)
        assert download.fetcher.bytes_received == pytest.approx(
            (8 + 2) * SPACE.num_elements, rel=0.02
        )

    with_run(test)


@pytest.mark.parametrize("num_rounds", [3, 9])
def test_a_part_whose_means_are_no_longer_kept_is_taken_anew(num_rounds: int) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        download = here.download(messenger)
        await download.run(1)
        for _ in range(num_rounds):
            here.commit()
        island.states[0].replace(
            {}, island.states[0].position
        )  # as on an island that has just joined
        island.describe()
        assert await enter_state(here, download) == 1 + num_rounds
        assert download.digests() == island.digests

    with_run(test)


def test_what_was_taken_anew_may_be_of_a_later_round_than_asked_for() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        for _ in range(3):
            here.commit()
        download = here.download(messenger)
        assert await download.catch_up(2) == 3

    with_run(test)


def test_each_rank_of_a_donor_gives_what_it_carries() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a", num_ranks=3)
        here.commit()
        watched = Watched(messenger)
        download = here.download(watched)
        await enter_state(here, download)
        given = [address for address, kind, _ in watched.calls if kind == "part"]
        assert [given.count(m.address) for m in island.messengers] == [
            island.carriers.count(r) for r in range(3)
        ]

    with_run(test)


def test_a_download_that_takes_long_tells_how_much_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outer.transfer.download, "TELL_SECONDS", 0.5)

    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        here.commit()
        texts, told, inner, num_parts = [], asyncio.Event(), messenger.call, 0

        async def call(address: str, kind: str, body: bytes, **options: Any) -> bytes:
            nonlocal num_parts
            num_parts += kind == "part"
            if kind == "part" and num_parts > 3:
                await told.wait()
            return await inner(address, kind, body, **options)

        def tell(text: str) -> None:
            texts.append(text)
            if text.startswith(f"3 of {NUM_PARTS} parts, "):
                told.set()

        messenger.call = call  # pyright: ignore[reportAttributeAccessIssue]
        await here.download(messenger, on_progress=tell).run(1)
        assert told.is_set() and all(text.endswith(" from a") for text in texts)

    with_run(test)


def test_parts_go_over_the_bulk_lane_and_nothing_else_does() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        here.commit()
        watched = Watched(messenger)
        await enter_state(here, here.download(watched))
        assert {(kind, lane) for _, kind, lane in watched.calls} == {
            ("state", "control"), ("part", "bulk"), ("taken", "control")
        }  # fmt: skip

    with_run(test)


def test_a_transfer_works_over_libp2p() -> None:
    async def test() -> None:
        async with swarm("hivemind") as place:
            here = Run()
            opened = [await place.open(Endpoint(name, 0)) for name in ("a", "joiner")]

            async def open_one(name: str, rank: int) -> Messenger:
                return opened[0].messenger

            await here.enter("a", open_one=open_one)
            here.commit()
            assert await enter_state(here, here.download(opened[1].messenger)) == 1

    run(test())


def test_both_sides_tell_when_the_first_part_moves() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island, fetched = await here.enter("a"), []
        here.commit()
        await here.download(messenger, on_first_part=fetched.append).run(1)
        assert fetched == island.donated == [1]

    with_run(test)


def test_the_last_rounds_are_described_with_their_digests() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island, digests = await here.enter("a"), {}
        for _ in range(18):
            here.commit()
            digests[here.round] = island.digest
        download = here.download(messenger)
        for number in range(3, 19):
            described = await download.describe(number)
            assert described.digest == digests[number] and described.position.tokens == 10 * number
        assert described.included == [island.member.incarnation]
        assert sorted(island.donors[0]._descriptions) == list(range(3, 19))

    with_run(test)


def test_rounds_of_a_history_that_was_left_are_not_described() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        here.commit()
        island.states[0].replace({}, Position(round=3, tokens=99))
        island.describe()
        assert sorted(island.donors[0]._descriptions) == [3]

    with_run(test)


@pytest.mark.slow
@pytest.mark.parametrize("num_donors", [1, 2])
def test_of_25m_parameters_hardly_a_byte_more_than_the_state_is_received(num_donors: int) -> None:
    space = Space([Spec("w", (25_000_000,))], part_elements=262_144)

    async def test() -> None:
        traffic = Traffic()
        donors = []
        for name in "ab"[:num_donors]:
            messenger = await tcp(name)
            state = GlobalState(
                {p.index: torch.randn(p.num_elements) for p in space.parts}, DEFAULTS
            )
            state.position = Position(round=1, tokens=1)
            Donor(state, messenger).describe("d" * 32, [0] * len(space.parts), space.fingerprint)
            donors.append(messenger)
        joiner = await tcp("joiner", traffic=traffic)
        plan = DownloadPlan(
            space,
            [p.index for p in space.parts],
            build_uniform_choice(build_codec("bf16")),
            DEFAULTS,
        )
        download = Download(joiner, plan)
        download.use_donors([member(f"donor-{i}", [m.address]) for i, m in enumerate(donors)])
        started = time.monotonic()
        await download.run(1)
        seconds, useful = time.monotonic() - started, 8 * space.num_elements
        print(
            f"\n{num_donors} donors: {useful / 1e6:.0f} MB in {seconds:.2f} s, "
            f"{useful / seconds / 1e6:.0f} MB/s; "
            f"useful {useful / traffic.bytes_received:.5f} of {traffic.bytes_received} bytes "
            "received; "
            f"{num_donors * outer.transfer.download.WORKERS_PER_DONOR} parts of "
            f"{8 * space.parts[0].num_elements} "
            "bytes asked for at a time"
        )
        assert useful / traffic.bytes_received > 0.999
        for messenger in (joiner, *donors):
            await messenger.close()

    run(test())
