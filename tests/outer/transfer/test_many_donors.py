"""Several donors that die or stall, and several joiners that share one, over real sockets."""

import asyncio

import pytest

import outer.network.deadlines
import outer.transfer.donor
import outer.transfer.donor_client
import outer.transfer.download
from outer.errors import TransportError
from outer.network.endpoints import Endpoint, Messenger
from outer.transfer.donor import AdmissionGate, PartRequest
from tests.outer.donors import NUM_PARTS, Run, Watched, enter_state, tcp, with_run
from tests.outer.nets import run


def test_a_donor_that_dies_in_the_middle_does_not_matter() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        first, second = await here.enter("a"), await here.enter("b")
        here.commit()
        tasks = []

        def act(number: int) -> None:
            if number == NUM_PARTS // 2 and not tasks:
                tasks.append(asyncio.create_task(first.close()))

        watched = Watched(messenger, act)
        await enter_state(here, here.download(watched))
        asked = [address for address, kind, _ in watched.calls if kind == "part"]
        assert {first.messengers[0].address, second.messengers[0].address} == set(asked)

    with_run(test)


def test_when_all_donors_are_gone_each_is_named_with_its_cause() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        first, second = await here.enter("a"), await here.enter("b")
        here.commit()
        second.describe(fingerprint="f" * 32)
        await first.close()
        with pytest.raises(TransportError, match=r"a: .* lost.*b: it trains another model"):
            await here.download(messenger).run(1)

    with_run(test)


def test_a_donor_that_stands_still_is_noticed_long_before_a_part_could_be_too_late(
    monkeypatch,
) -> None:
    monkeypatch.setattr(outer.transfer.donor_client, "QUIET_SECONDS", 0.2)
    monkeypatch.setattr(outer.transfer.donor_client, "PROBE_SECONDS", 0.5)

    async def test(here: Run, messenger: Messenger) -> None:
        donor = await here.enter("a")
        here.commit()

        async def hang(source: Endpoint, body: bytes) -> bytes:
            donor.messengers[0].serve("state", hang)
            await asyncio.sleep(1000)
            return b""

        donor.messengers[0].serve("part", hang)
        started = asyncio.get_running_loop().time()
        with pytest.raises(TransportError, match="a: "):
            await here.download(messenger).run(1)
        assert asyncio.get_running_loop().time() - started < outer.transfer.donor.PART_SECONDS / 4

    with_run(test)


def test_parts_that_came_are_kept_when_the_donors_are_changed() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        first, second = await here.enter("a"), await here.enter("b")
        here.commit()
        closing = []
        half = NUM_PARTS // 2
        watched = Watched(
            messenger,
            lambda n: closing.append(asyncio.create_task(first.close())) if n == half else None,
        )
        download = here.download(watched, donors=[first])
        with pytest.raises(TransportError, match="a: "):
            await download.run(1)
        num_held = len(download.parts)
        assert 0 < num_held < NUM_PARTS
        download.use_donors([second.member])
        await enter_state(here, download)
        assert [a for a, k, _ in watched.calls if k == "part"].count(
            second.messengers[0].address
        ) == (NUM_PARTS - num_held)

    with_run(test)


def test_a_donor_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer.network.deadlines, "DEFAULT_FLOOR_SECONDS", 0.1)

    async def test(here: Run, messenger: Messenger) -> None:
        stalled = await here.enter("a")
        await here.enter("b")
        here.commit()

        async def stall(source: Endpoint, body: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

        stalled.messengers[0].serve("part", stall)
        download = here.download(messenger)
        await enter_state(here, download)
        assert "did not come within" in download._donors[0].cause

    with_run(test)


def test_three_joiners_at_once_all_get_in_though_the_donor_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outer.transfer.donor, "GATE_SECONDS", 0.0)
    monkeypatch.setattr(outer.transfer.download, "PAUSE_SECONDS", 0.01)

    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        island.donors[0].is_busy = True

        def act(number: int) -> None:
            if number % 20 == 0 and here.round < 3:
                here.commit()

        joiners = [Watched(await tcp(name), act) for name in "xyz"]
        try:
            downloads = [here.download(joiner) for joiner in joiners]
            rounds = await asyncio.gather(*(enter_state(here, download) for download in downloads))
            assert min(rounds) >= 1
            assert sum(j.num("part") for j in joiners) > 3 * NUM_PARTS, (
                "nobody was told to come again"
            )
        finally:
            for joiner in joiners:
                await joiner.close()

    with_run(test)


def test_a_worker_with_nothing_left_to_take_does_not_keep_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outer.transfer.donor, "GATE_SECONDS", 1000.0)

    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        island.donors[0].is_busy = True
        assert await enter_state(here, here.download(messenger)) == 1

    with_run(test)


@pytest.mark.parametrize(("is_busy", "num_served"), [(False, 4), (True, 1)])
def test_a_donor_serves_few_parts_at_a_time(
    is_busy: bool, num_served: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outer.transfer.donor, "GATE_SECONDS", 0.02)

    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        island.donors[0].is_busy = is_busy

        async def ask(worker: int) -> bytes:
            body = PartRequest(part=0, worker=worker).model_dump_json().encode()
            reply = await messenger.call(
                island.messengers[0].address, "part", body, timeout_seconds=5, lane="bulk"
            )
            return reply.partition(b"\n")[0]

        assert [await ask(worker) for worker in range(5)] == [b"part"] * num_served + [b"busy"] * (
            5 - num_served
        )
        assert await ask(0) == b"part"
        await messenger.call(island.messengers[0].address, "taken", b"{}", timeout_seconds=5)
        assert await ask(4) == b"part"

    with_run(test)


def test_a_free_place_goes_to_the_island_that_has_the_fewest() -> None:
    async def test() -> None:
        gate, greedy, modest = (
            AdmissionGate(lambda: 4),
            Endpoint("greedy", 0),
            Endpoint("modest", 0),
        )
        assert all([await gate.enter((greedy, worker)) for worker in range(4)])
        order: list[str] = []

        async def wait(caller: tuple[Endpoint, int]) -> None:
            await gate.enter(caller)
            order.append(caller[0].island)

        waiting = [
            asyncio.create_task(wait(caller)) for caller in [(greedy, 4), (greedy, 5), (modest, 0)]
        ]
        await asyncio.sleep(0)
        for worker in range(3):
            gate.leave((greedy, worker))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*waiting)
        assert order[0] == "modest"

    run(test())


def test_the_place_of_a_joiner_that_died_is_given_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer.transfer.donor, "PART_SECONDS", 0.0)

    async def test() -> None:
        gate = AdmissionGate(lambda: 1)
        assert await gate.enter((Endpoint("dead", 0), 0)) and await gate.enter(
            (Endpoint("other", 0), 0)
        )

    run(test())
