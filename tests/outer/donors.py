"""Support for tests of transfers: islands that commit rounds and are donors, and joiners that fetch from them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outer.account import to_json
from outer.codecs import build_codec
from outer.coding import uniform
from outer.config import OuterOptimizerConfig
from outer.digest import combine, seal
from outer.donor import Donor
from outer.membership.base import Lane, Member, Messenger
from outer.membership.calls import StreamMessenger
from outer.membership.tcp import dial, listen
from outer.parts_cache import PartsCache
from outer.phases import NoHooks
from outer.space import Space
from outer.state import GlobalState, Position
from outer.transfer import Fetch, Share
from outer.transports.base import Endpoint, Traffic
from tests.outer.nets import run


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


def cache_in(folder: Path, run_name: str = "run", fingerprint: str = SPACE.fingerprint) -> PartsCache:
    return PartsCache(folder, fingerprint, run_name)


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return list(folder.glob(pattern))
