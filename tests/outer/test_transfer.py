"""A joiner takes its state from donors that go on committing rounds, die, stall and lie, over real sockets."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import outer.deadlines
import outer.donor
import outer.transfer
from outer.account import to_json
from outer.codecs import build_codec
from outer.coding import uniform
from outer.config import OuterOptimizerConfig
from outer.digest import combine, seal
from outer.donor import Donor, Gate, PartRequest
from outer.errors import MessageError, TransportError
from outer.membership.base import Lane, Member, Messenger
from outer.membership.calls import StreamMessenger
from outer.membership.tcp import dial, listen
from outer.parts_cache import PartsCache
from outer.phases import NoHooks
from outer.space import Space
from outer.state import GlobalState, Position
from outer.transfer import Fetch, Share
from outer.transports.base import Endpoint, Traffic
from tests.outer.nets import run, swarm


@dataclass(frozen=True)
class Spec:
    """The one parameter of a model."""

    name: str
    shape: tuple[int, ...]


SPACE = Space([Spec("w", (40 * 256 + 77,))], part_elements=512, block_elements=256)
PARTS = [part.index for part in SPACE.parts]
NUM_PARTS = len(PARTS)
DEFAULTS = OuterOptimizerConfig()


def values(seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {part.index: torch.randn(part.num_elements, generator=generator) for part in SPACE.parts}


async def tcp(name: str, rank: int = 0, traffic: Traffic | None = None) -> Messenger:
    return await listen(StreamMessenger("run", Endpoint(name, rank), dial, traffic or Traffic()), "127.0.0.1", 0)


def member(name: str, addresses: Sequence[str]) -> Member:
    number = name.encode().hex().zfill(8)
    return Member(
        island=name,
        incarnation=number,
        identity=number,
        config_hash="c" * 32,
        control_addresses=list(addresses),
        transport_addresses=list(addresses),
        round=1,
    )


class Heard(NoHooks):
    """Notes the phases reached."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def reached(self, phase: str, round_number: int) -> None:
        self.phases.append(phase)


class Island:
    """A donor: each rank carries an equal run of parts."""

    def __init__(self, name: str, messengers: Sequence[Messenger], config: OuterOptimizerConfig) -> None:
        self.name, self.messengers = name, messengers
        self.heard = Heard()
        ranks = range(len(messengers))
        self.carriers = [i * len(messengers) // NUM_PARTS for i in PARTS]
        shares = [{i: v for i, v in values(0).items() if self.carriers[i] == rank} for rank in ranks]
        self.states = [GlobalState(share, config) for share in shares]
        self.donors = [Donor(s, m, self.heard) for s, m in zip(self.states, messengers, strict=True)]
        self.member = member(name, [m.address for m in messengers])

    @property
    def digests(self) -> dict[int, bytes]:
        return {i: d for state in self.states for i, d in state.digests().items()}

    @property
    def digest(self) -> str:
        return seal(combine([self.digests[i] for i in PARTS]), to_json(self.states[0].position.account))

    def describe(self, digest: str | None = None, **changes: Any) -> None:
        fields = {"carriers": self.carriers, "fingerprint": SPACE.fingerprint, "included": [self.member.incarnation]}
        self.donors[0].describe(digest or self.digest, **(fields | changes))

    async def close(self) -> None:
        for messenger in self.messengers:
            await messenger.close()


class Run:
    """Islands that commit the same rounds, when a test says so. Build it on the event loop."""

    def __init__(self, codec: str = "bf16", config: OuterOptimizerConfig = DEFAULTS) -> None:
        self.codec, self.config = build_codec(codec), config
        self.islands: list[Island] = []
        self.round = 0

    async def enter(self, name: str, num_ranks: int = 1, open_one: Callable[..., Awaitable[Messenger]] = tcp) -> Island:
        island = Island(name, [await open_one(name, rank) for rank in range(num_ranks)], self.config)
        self.islands.append(island)
        return island

    def commit(self) -> None:
        """One round, at once, on every island."""
        payloads = {i: self.codec.encode(v) for i, v in values(100 + self.round).items()}
        means = {i: self.codec.decode(p, SPACE.parts[i].num_elements) for i, p in payloads.items()}
        self.round += 1
        for island in self.islands:
            for state in island.states:
                mine = {i: means[i] for i in state.parts}
                state.commit(mine, Position(round=self.round, tokens=10 * self.round), payloads)
            island.describe()

    def fetch(self, messenger: Messenger, *, donors: Sequence[Island] | None = None, **options: Any) -> Fetch:
        share = Share(SPACE, PARTS, uniform(self.codec), self.config)
        return Fetch(messenger, [i.member for i in donors or self.islands], share, **options)

    async def close(self) -> None:
        for island in self.islands:
            await island.close()


class Watched:
    """A messenger that notes its calls, and lets a test act before each."""

    def __init__(self, inner: Messenger, act: Callable[[int], Any] = lambda number: None) -> None:
        self._inner, self._act = inner, act
        self.calls: list[tuple[str, str, Lane]] = []
        """(address, kind, lane)"""
        self.serve, self.close = inner.serve, inner.close

    @property
    def address(self) -> str:
        return self._inner.address

    async def call(
        self, address: str, kind: str, body: bytes, *, timeout_seconds: float, lane: Lane = "control"
    ) -> bytes:
        self.calls.append((address, kind, lane))
        self._act(self.num("part") + self.num("mean"))
        return await self._inner.call(address, kind, body, timeout_seconds=timeout_seconds, lane=lane)

    def num(self, kind: str) -> int:
        return sum(k == kind for _, k, _ in self.calls)


def with_run(test: Callable[[Run, Messenger], Awaitable[None]], **settings: Any) -> None:
    """Run a test's coroutine with a run of no islands and a joiner's messenger."""

    async def work() -> None:
        here, messenger = Run(**settings), await tcp("joiner")
        try:
            await test(here, messenger)
        finally:
            await messenger.close()
            await here.close()

    run(work())


async def enter_state(here: Run, fetch: Fetch) -> int:
    """What a joiner does: fetch, catch up with the donors, and prove it. The round it is in."""
    await fetch.run(1)
    target = (await fetch.describe(None)).position.round
    reached = await fetch.catch_up(target)
    digests = fetch.digests()
    await fetch.check(reached, combine([digests[i] for i in PARTS]))
    return reached


# -- rounds go on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_state_fetched_while_rounds_go_on_is_that_of_an_island_that_was_there(codec: str, momentum: float) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        for name in ("a", "b"):
            await here.enter(name)
        here.commit()
        watched = Watched(messenger, lambda number: here.commit() if number % 8 == 0 and here.round < 6 else None)
        fetch = here.fetch(watched)
        await fetch.run(1)
        assert len({state.round for state in fetch.parts.values()}) > 1
        await enter_state(here, fetch)
        while here.round < 6:
            here.commit()
        assert await fetch.catch_up(6) == 6
        assert fetch.digests() == here.islands[0].digests
        joiner = await here.enter("joiner")
        joiner.states[0].replace(fetch.parts, here.islands[0].states[0].position)
        here.commit()
        assert joiner.digest == here.islands[0].digest == here.islands[1].digest

    with_run(test, codec=codec, config=OuterOptimizerConfig(momentum=momentum))


def test_parts_are_brought_up_by_means_not_taken_twice() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        here.commit()
        watched = Watched(messenger)
        fetch = here.fetch(watched)
        await fetch.run(1)
        here.commit()
        assert await fetch.catch_up(2) == 2
        assert (watched.num("part"), watched.num("mean")) == (NUM_PARTS, NUM_PARTS)
        assert fetch.bytes_received == pytest.approx((8 + 2) * SPACE.num_elements, rel=0.02)

    with_run(test)


@pytest.mark.parametrize("num_rounds", [3, 9])
def test_a_part_whose_means_are_no_longer_kept_is_taken_anew(num_rounds: int) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        fetch = here.fetch(messenger)
        await fetch.run(1)
        for _ in range(num_rounds):
            here.commit()
        island.states[0].replace({}, island.states[0].position)  # as on an island that has just come
        island.describe()
        assert await enter_state(here, fetch) == 1 + num_rounds
        assert fetch.digests() == island.digests

    with_run(test)


def test_what_was_taken_anew_may_be_of_a_later_round_than_asked_for() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        for _ in range(3):
            here.commit()
        fetch = here.fetch(messenger)
        assert await fetch.catch_up(2) == 3

    with_run(test)


def test_each_rank_of_a_donor_gives_what_it_carries() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a", num_ranks=3)
        here.commit()
        watched = Watched(messenger)
        fetch = here.fetch(watched)
        await enter_state(here, fetch)
        given = [address for address, kind, _ in watched.calls if kind == "part"]
        assert [given.count(m.address) for m in island.messengers] == [island.carriers.count(r) for r in range(3)]

    with_run(test)


def test_parts_go_over_the_bulk_lane_and_nothing_else_does() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        here.commit()
        watched = Watched(messenger)
        await enter_state(here, here.fetch(watched))
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
            assert await enter_state(here, here.fetch(opened[1].messenger)) == 1

    run(test())


def test_both_sides_tell_when_the_first_part_moves() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island, hooks = await here.enter("a"), Heard()
        here.commit()
        await here.fetch(messenger, hooks=hooks).run(1)
        assert hooks.phases == ["fetch"] and island.heard.phases == ["donate"]

    with_run(test)


# -- several donors, several joiners --------------------------------------------------------------------------


def test_a_donor_that_dies_in_the_middle_does_not_matter() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        first, second = await here.enter("a"), await here.enter("b")
        here.commit()
        tasks = []

        def act(number: int) -> None:
            if number == NUM_PARTS // 2 and not tasks:
                tasks.append(asyncio.create_task(first.close()))

        watched = Watched(messenger, act)
        await enter_state(here, here.fetch(watched))
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
            await here.fetch(messenger).run(1)

    with_run(test)


def test_parts_that_came_are_kept_when_the_donors_are_changed() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        first, second = await here.enter("a"), await here.enter("b")
        here.commit()
        closing = []
        half = NUM_PARTS // 2
        watched = Watched(
            messenger, lambda n: closing.append(asyncio.create_task(first.close())) if n == half else None
        )
        fetch = here.fetch(watched, donors=[first])
        with pytest.raises(TransportError, match="a: "):
            await fetch.run(1)
        num_held = len(fetch.parts)
        assert 0 < num_held < NUM_PARTS
        fetch.use([second.member])
        await enter_state(here, fetch)
        assert [a for a, k, _ in watched.calls if k == "part"].count(second.messengers[0].address) == (
            NUM_PARTS - num_held
        )

    with_run(test)


def test_a_donor_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer.deadlines, "DEFAULT_FLOOR_SECONDS", 0.1)

    async def test(here: Run, messenger: Messenger) -> None:
        stalled = await here.enter("a")
        await here.enter("b")
        here.commit()

        async def stall(source: Endpoint, body: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

        stalled.messengers[0].serve("part", stall)
        fetch = here.fetch(messenger)
        await enter_state(here, fetch)
        assert "did not come within" in fetch._sources[0].cause

    with_run(test)


def test_three_joiners_at_once_all_get_in_though_the_donor_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer.donor, "GATE_SECONDS", 0.0)
    monkeypatch.setattr(outer.transfer, "PAUSE_SECONDS", 0.01)

    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        island.donors[0].is_busy = True

        def act(number: int) -> None:
            if number % 20 == 0 and here.round < 3:
                here.commit()

        joiners = [Watched(await tcp(name), act) for name in "xyz"]
        try:
            fetches = [here.fetch(joiner) for joiner in joiners]
            rounds = await asyncio.gather(*(enter_state(here, fetch) for fetch in fetches))
            assert min(rounds) >= 1
            assert sum(j.num("part") for j in joiners) > 3 * NUM_PARTS, "nobody was told to come again"
        finally:
            for joiner in joiners:
                await joiner.close()

    with_run(test)


def test_a_worker_with_nothing_left_to_take_does_not_keep_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer.donor, "GATE_SECONDS", 1000.0)

    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        island.donors[0].is_busy = True
        assert await enter_state(here, here.fetch(messenger)) == 1

    with_run(test)


@pytest.mark.parametrize(("is_busy", "num_served"), [(False, 4), (True, 1)])
def test_a_donor_serves_few_parts_at_a_time(is_busy: bool, num_served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer.donor, "GATE_SECONDS", 0.02)

    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        island.donors[0].is_busy = is_busy

        async def ask(worker: int) -> bytes:
            body = PartRequest(part=0, worker=worker).model_dump_json().encode()
            reply = await messenger.call(island.messengers[0].address, "part", body, timeout_seconds=5, lane="bulk")
            return reply.partition(b"\n")[0]

        assert [await ask(worker) for worker in range(5)] == [b"part"] * num_served + [b"busy"] * (5 - num_served)
        assert await ask(0) == b"part"
        await messenger.call(island.messengers[0].address, "taken", b"{}", timeout_seconds=5)
        assert await ask(4) == b"part"

    with_run(test)


def test_a_free_place_goes_to_the_island_that_has_the_fewest() -> None:
    async def test() -> None:
        gate, greedy, modest = Gate(lambda: 4), Endpoint("greedy", 0), Endpoint("modest", 0)
        assert all([await gate.enter((greedy, worker)) for worker in range(4)])
        order: list[str] = []

        async def wait(caller: tuple[Endpoint, int]) -> None:
            await gate.enter(caller)
            order.append(caller[0].island)

        waiting = [asyncio.create_task(wait(caller)) for caller in [(greedy, 4), (greedy, 5), (modest, 0)]]
        await asyncio.sleep(0)
        for worker in range(3):
            gate.leave((greedy, worker))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*waiting)
        assert order[0] == "modest"

    run(test())


def test_the_place_of_a_joiner_that_died_is_given_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer.donor, "TAKE_SECONDS", 0.0)

    async def test() -> None:
        gate = Gate(lambda: 1)
        assert await gate.enter((Endpoint("dead", 0), 0)) and await gate.enter((Endpoint("other", 0), 0))

    run(test())


# -- resumed --------------------------------------------------------------------------------------------------


def cache_in(folder: Path, run_name: str = "run", fingerprint: str = SPACE.fingerprint) -> PartsCache:
    return PartsCache(folder, fingerprint, run_name)


def test_a_killed_joiner_takes_only_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # a joiner that is told the donor's address, and killed by its donor
        try:
            address = os.read(reading, 100).decode()
            asyncio.run(_join_until_killed(address, folder))
        finally:
            os._exit(1)

    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        asked, serve, is_dead = [], island.donors[0]._on_part, asyncio.Event()

        async def serve_and_kill(source: Endpoint, body: bytes) -> bytes:
            asked.append(source)
            if len(asked) == NUM_PARTS // 2:
                kill(child)
                is_dead.set()
            return await serve(source, body)

        island.messengers[0].serve("part", serve_and_kill)
        os.write(writing, island.messengers[0].address.encode())
        await is_dead.wait()
        num_kept = len(files(folder, "part-??????"))
        assert num_kept > 0
        watched = Watched(messenger)
        fetch = here.fetch(watched, cache=cache_in(folder))
        await enter_state(here, fetch)
        assert watched.num("part") == NUM_PARTS - num_kept and fetch.digests() == island.digests

    try:
        with_run(test)
    finally:
        os.close(reading)
        os.close(writing)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return list(folder.glob(pattern))


async def _join_until_killed(address: str, folder: Path) -> None:
    share = Share(SPACE, PARTS, uniform(build_codec("bf16")), DEFAULTS)
    await Fetch(await tcp("joiner"), [member("a", [address])], share, cache_in(folder)).run(1)


async def fill(here: Run, messenger: Messenger, folder: Path) -> None:
    """An island that has committed, and a joiner's cache of its whole state."""
    await here.enter("a")
    here.commit()
    await here.fetch(messenger, cache=cache_in(folder)).run(1)
    assert len(files(folder)) == NUM_PARTS


def damage(path: Path, how: str) -> None:
    raw = bytearray(path.read_bytes())
    match how:
        case "cut":
            raw = raw[:-5]
        case "flipped":
            raw[-9] ^= 1
        case "renumbered":
            raw = raw.replace(b'"round":1', b'"round":x')
        case "another part":
            raw = bytearray(path.with_name("part-000007").read_bytes())
        case "empty":
            raw = bytearray()
    path.write_bytes(raw)


@pytest.mark.parametrize("how", ["cut", "flipped", "renumbered", "another part", "empty"])
def test_a_damaged_part_on_disk_is_taken_anew(tmp_path: Path, how: str) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await fill(here, messenger, tmp_path)
        damage(tmp_path / "part-000003", how)
        watched = Watched(messenger)
        await enter_state(here, here.fetch(watched, cache=cache_in(tmp_path)))
        assert watched.num("part") == 1

    with_run(test)


@pytest.mark.parametrize("other", [{"run_name": "another"}, {"fingerprint": "f" * 32}])
def test_parts_of_another_run_or_model_are_not_read(tmp_path: Path, other: dict[str, str]) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await fill(here, messenger, tmp_path)
        cache = cache_in(tmp_path, **other)
        assert all(cache.read(part.index, part.num_elements) is None for part in SPACE.parts)

    with_run(test)


def test_parts_on_disk_that_are_too_old_are_brought_up_by_means(tmp_path: Path) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await fill(here, messenger, tmp_path)
        here.commit()
        watched = Watched(messenger)
        assert await here.fetch(watched, cache=cache_in(tmp_path)).run(2) == 2
        assert (watched.num("part"), watched.num("mean")) == (0, NUM_PARTS)

    with_run(test)


def test_parts_on_disk_beyond_the_donors_round_are_not_used(tmp_path: Path) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        for _ in range(3):
            here.commit()
        await here.fetch(messenger, cache=cache_in(tmp_path)).run(1)
        again = Run()
        island = await again.enter("b")
        again.commit()
        fetch = again.fetch(messenger, cache=cache_in(tmp_path))
        assert await enter_state(again, fetch) == 1 and fetch.digests() == island.digests
        await again.close()

    with_run(test)


def test_a_cache_that_is_removed_leaves_nothing(tmp_path: Path) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await fill(here, messenger, tmp_path / "parts")
        cache_in(tmp_path / "parts").remove()
        assert not files(tmp_path)

    with_run(test)


def test_a_joiner_without_room_on_disk_goes_on_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")

    async def test(here: Run, messenger: Messenger) -> None:
        await here.enter("a")
        here.commit()
        with caplog.at_level(logging.WARNING):
            await enter_state(here, here.fetch(messenger, cache=cache_in(blocked / "parts")))
        assert [r.name for r in caplog.records] == ["outer.parts_cache"]

    with_run(test)


# -- donors that are no donors --------------------------------------------------------------------------------


def packed(index: int, *, num_rounds: int = 1, tokens: int = 10, spoil: float | None = None, cut: int = 0) -> bytes:
    """A reply with a part, as a donor would send it but for what is asked."""
    body = values(0)[index].clone()
    if spoil is not None:
        body[-1] = spoil
    header = Position(round=num_rounds, tokens=tokens).model_dump_json(exclude={"account"}).encode()
    raw = b"part\n" + header + b"\n" + body.numpy().tobytes() + bytes(4 * body.numel())
    return raw[: len(raw) - cut]


LIES = {
    "a part cut short": (lambda i: packed(i, cut=4), "bytes, expected"),
    "a part with nan": (lambda i: packed(i, spoil=float("nan")), "non-finite"),
    "a part of round 0": (lambda i: packed(i, num_rounds=0), "of round 0, asked for 1"),
    "a part of a round far ahead": (lambda i: packed(i, num_rounds=1000), "of round 1000, but is in round 1"),
    "a part of another history": (lambda i: packed(i, tokens=11), "another history"),
    "a part without position": (lambda i: b"part\n" + packed(i)[40:], "state"),
    "a mean in place of a part": (lambda i: b"mean\n" + bytes(4096), "answers b'mean'"),
    "gone in place of a part": (lambda i: b"gone\n", "answers b'gone'"),
    "nothing": (lambda i: b"", "answers b''"),
    "noise": (lambda i: os.urandom(5000), "answers"),
}


async def enter_liar(here: Run, lie: Callable[[int], bytes]) -> Island:
    island = await here.enter("liar")

    async def answer(source: Endpoint, body: bytes) -> bytes:
        return lie(PartRequest.model_validate_json(body).part)

    island.messengers[0].serve("part", answer)
    return island


@pytest.mark.parametrize("kind", LIES)
def test_a_donor_that_sends_nonsense_is_named(kind: str) -> None:
    lie, text = LIES[kind]

    async def test(here: Run, messenger: Messenger) -> None:
        await enter_liar(here, lie)
        here.commit()
        with pytest.raises(TransportError, match=f"liar: .*{text}"):
            await here.fetch(messenger).run(1)

    with_run(test)


@pytest.mark.parametrize("kind", ["a part with nan", "a part of a round far ahead", "noise"])
def test_an_honest_donor_makes_good_for_one_that_lies(kind: str) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await enter_liar(here, LIES[kind][0])
        island = await here.enter("honest")
        here.commit()
        fetch = here.fetch(messenger)
        await enter_state(here, fetch)
        assert fetch.digests() == island.digests

    with_run(test)


def test_a_mean_that_is_malformed_is_refused() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        fetch = here.fetch(messenger)
        await fetch.run(1)
        here.commit()

        async def answer(source: Endpoint, body: bytes) -> bytes:
            return b"mean\n" + b"\1\0" + bytes(7)

        island.messengers[0].serve("mean", answer)
        with pytest.raises(TransportError, match="a: bf16 payload of 7 bytes"):
            await fetch.catch_up(2)

    with_run(test)


def test_bytes_that_are_sound_but_wrong_fail_the_digest_and_are_forgotten(tmp_path: Path) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        await enter_liar(here, packed)
        here.commit()
        fetch = here.fetch(messenger, cache=cache_in(tmp_path / "parts"))
        with pytest.raises(MessageError, match="not that of round 1: liar says"):
            await enter_state(here, fetch)
        fetch.forget()
        assert not fetch.parts and not files(tmp_path)

    with_run(test)


def test_a_fresh_island_is_no_donor() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        island.describe()
        with pytest.raises(TransportError, match=r"a: .*cannot be a donor"):
            await here.fetch(messenger).run(0)
        body = PartRequest(part=0).model_dump_json().encode()
        with pytest.raises(MessageError, match="cannot be a donor"):
            await messenger.call(island.messengers[0].address, "part", body, timeout_seconds=5)

    with_run(test)


@pytest.mark.parametrize("carriers", [[0] * (NUM_PARTS - 1), [1] * NUM_PARTS])
def test_a_donor_that_does_not_cover_the_model_is_refused(carriers: list[int]) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        island.describe(carriers=carriers)
        with pytest.raises(TransportError, match="describes its state wrongly"):
            await here.fetch(messenger).run(1)

    with_run(test)


def test_a_donor_that_has_not_come_to_the_round_is_waited_for() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        watched = Watched(messenger, lambda number: here.commit() if number == 10 else None)
        assert await here.fetch(watched).run(2) == 2
        assert island.states[0].position.round == 2

    with_run(test)


@pytest.mark.parametrize("body", [b"", b"x", b"1", b'{"part":1e999}', b'{"part":"1"}', b'{"part":-1}', b"[" * 100_000])
def test_a_donor_refuses_requests_that_name_no_part(body: bytes) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        with pytest.raises(MessageError, match=r"not a PartRequest|not carried"):
            await messenger.call(island.messengers[0].address, "part", body, timeout_seconds=5)

    with_run(test)


@pytest.mark.parametrize(("part", "at_least"), [(NUM_PARTS, 0), (0, 9)])
def test_a_request_that_is_given_nothing_takes_no_place(part: int, at_least: int) -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()

        async def ask(**fields: int) -> bytes:
            body = PartRequest(**fields).model_dump_json().encode()
            return await messenger.call(island.messengers[0].address, "part", body, timeout_seconds=5)

        for worker in range(6):
            with suppress(MessageError):
                assert await ask(part=part, at_least=at_least, worker=worker) == b"behind\n"
        assert (await ask(part=0, worker=6)).startswith(b"part\n")

    with_run(test)


def test_new_donors_may_be_of_another_history() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        fetch = here.fetch(messenger)
        await fetch.run(1)
        island.states[0].position = Position(round=1, tokens=99)
        island.describe()
        fetch.forget()
        fetch.use([island.member])
        await enter_state(here, fetch)

    with_run(test)


# -- descriptions ---------------------------------------------------------------------------------------------


def test_the_last_rounds_are_described_with_their_digests() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island, digests = await here.enter("a"), {}
        for _ in range(18):
            here.commit()
            digests[here.round] = island.digest
        fetch = here.fetch(messenger)
        for number in range(3, 19):
            described = await fetch.describe(number)
            assert described.digest == digests[number] and described.position.tokens == 10 * number
        assert described.included == [island.member.incarnation]
        assert sorted(island.donors[0]._described) == list(range(3, 19))

    with_run(test)


def test_rounds_of_a_history_that_was_left_are_not_described() -> None:
    async def test(here: Run, messenger: Messenger) -> None:
        island = await here.enter("a")
        here.commit()
        here.commit()
        island.states[0].replace({}, Position(round=3, tokens=99))
        island.describe()
        assert sorted(island.donors[0]._described) == [3]

    with_run(test)


# -- how fast -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_donors", [1, 2])
def test_of_25m_parameters_hardly_a_byte_more_than_the_state_is_received(num_donors: int) -> None:
    space = Space([Spec("w", (25_000_000,))], part_elements=262_144)

    async def test() -> None:
        traffic = Traffic()
        donors = []
        for name in "ab"[:num_donors]:
            messenger = await tcp(name)
            state = GlobalState({p.index: torch.randn(p.num_elements) for p in space.parts}, DEFAULTS)
            state.position = Position(round=1, tokens=1)
            Donor(state, messenger).describe("d" * 32, [0] * len(space.parts), space.fingerprint)
            donors.append(messenger)
        joiner = await tcp("joiner", traffic=traffic)
        share = Share(space, [p.index for p in space.parts], uniform(build_codec("bf16")), DEFAULTS)
        fetch = Fetch(joiner, [member(f"donor-{i}", [m.address]) for i, m in enumerate(donors)], share)
        started = time.monotonic()
        await fetch.run(1)
        seconds, useful = time.monotonic() - started, 8 * space.num_elements
        print(
            f"\n{num_donors} donors: {useful / 1e6:.0f} MB in {seconds:.2f} s, {useful / seconds / 1e6:.0f} MB/s; "
            f"useful {useful / traffic.bytes_received:.5f} of {traffic.bytes_received} bytes received; "
            f"{num_donors * outer.transfer.WORKERS_PER_DONOR} parts of {8 * space.parts[0].num_elements} bytes asked "
            "for at a time"
        )
        assert useful / traffic.bytes_received > 0.999
        for messenger in (joiner, *donors):
            await messenger.close()

    run(test())
