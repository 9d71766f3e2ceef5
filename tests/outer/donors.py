"""Support for tests of outer/transfer: islands that commit rounds and are donors, and joiners."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.config import OuterOptimizerConfig
from outer.membership.base import Member
from outer.network.endpoints import Endpoint, Lane, Messenger, Traffic
from outer.network.rpc import StreamMessenger
from outer.network.run_key import PeerAuth
from outer.routes.dialer import dial
from outer.routes.streams import listen
from outer.space.digest import combine_digests, state_digest
from outer.space.layout import Space
from outer.state.global_state import GlobalState
from outer.state.part_state import Position
from outer.transfer.cache import PartsCache
from outer.transfer.donor import Donor
from outer.transfer.download import Download
from outer.transfer.download_plan import DownloadPlan
from tests.outer.nets import key_of, run


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
    auth = PeerAuth(island=key_of(name))
    messenger = StreamMessenger("run", Endpoint(name, rank), dial, traffic or Traffic(), auth)
    return await listen(messenger, "127.0.0.1", 0)


def member(name: str, addresses: Sequence[str]) -> Member:
    number = name.encode().hex().zfill(8)
    return Member(
        island=name,
        incarnation=number,
        identity=key_of(name).public,
        config_hash="c" * 32,
        control_addresses=list(addresses),
        transport_addresses=list(addresses),
        round=1,
    )


class Island:
    """A donor whose ranks carry equal numbers of consecutive parts."""

    def __init__(
        self, name: str, messengers: Sequence[Messenger], config: OuterOptimizerConfig
    ) -> None:
        self.name, self.messengers = name, messengers
        self.donated: list[int] = []
        """Rounds at which a joiner asked for a first part."""
        ranks = range(len(messengers))
        self.carriers = [i * len(messengers) // NUM_PARTS for i in PARTS]
        shares = [
            {i: v for i, v in values(0).items() if self.carriers[i] == rank} for rank in ranks
        ]
        self.states = [GlobalState(share, config) for share in shares]
        self.donors = [
            Donor(s, m, self.donated.append) for s, m in zip(self.states, messengers, strict=True)
        ]
        self.member = member(name, [m.address for m in messengers])

    @property
    def digests(self) -> dict[int, bytes]:
        return {i: d for state in self.states for i, d in state.digests().items()}

    @property
    def digest(self) -> str:
        return state_digest(
            combine_digests([self.digests[i] for i in PARTS]),
            self.states[0].position.ledger.model_dump_json(),
        )

    def describe(self, digest: str | None = None, **changes: Any) -> None:
        fields = {
            "carriers": self.carriers,
            "fingerprint": SPACE.fingerprint,
            "included": [self.member.incarnation],
        }
        self.donors[0].describe(digest or self.digest, **(fields | changes))

    async def close(self) -> None:
        for messenger in self.messengers:
            await messenger.close()


class Run:
    """Islands that commit the same rounds on a test's command. Build it on the event loop."""

    def __init__(self, codec: str = "bf16", config: OuterOptimizerConfig = DEFAULTS) -> None:
        self.codec, self.config = build_codec(codec), config
        self.islands: list[Island] = []
        self.round = 0

    async def enter(
        self, name: str, num_ranks: int = 1, open_one: Callable[..., Awaitable[Messenger]] = tcp
    ) -> Island:
        island = Island(
            name, [await open_one(name, rank) for rank in range(num_ranks)], self.config
        )
        self.islands.append(island)
        return island

    def commit(self) -> None:
        """Commit one round on every island at once."""
        payloads = {i: self.codec.encode(v) for i, v in values(100 + self.round).items()}
        means = {i: self.codec.decode(p, SPACE.parts[i].num_elements) for i, p in payloads.items()}
        self.round += 1
        for island in self.islands:
            for state in island.states:
                mine = {i: means[i] for i in state.parts}
                state.commit(mine, Position(round=self.round, tokens=10 * self.round), payloads)
            island.describe()

    def download(
        self, messenger: Messenger, *, donors: Sequence[Island] | None = None, **options: Any
    ) -> Download:
        plan = DownloadPlan(SPACE, PARTS, build_uniform_choice(self.codec), self.config)
        download = Download(messenger, plan, **options)
        download.use_donors([i.member for i in donors or self.islands])
        return download

    async def close(self) -> None:
        for island in self.islands:
            await island.close()


class Watched:
    """A messenger that records its calls, and lets a test act before each of them."""

    def __init__(self, inner: Messenger, act: Callable[[int], Any] = lambda number: None) -> None:
        self._inner, self._act = inner, act
        self.calls: list[tuple[str, str, Lane]] = []
        """(address, kind, lane)"""
        self.serve, self.close = inner.serve, inner.close

    @property
    def address(self) -> str:
        return self._inner.address

    async def call(
        self,
        address: str,
        kind: str,
        body: bytes,
        *,
        timeout_seconds: float,
        lane: Lane = "control",
        longest: int = 0,
    ) -> bytes:
        self.calls.append((address, kind, lane))
        self._act(self.num("part") + self.num("mean"))
        return await self._inner.call(
            address, kind, body, timeout_seconds=timeout_seconds, lane=lane, longest=longest
        )

    def num(self, kind: str) -> int:
        return sum(k == kind for _, k, _ in self.calls)


def with_run(test: Callable[[Run, Messenger], Awaitable[None]], **settings: Any) -> None:
    """Run a test's coroutine with an empty run and a joiner's messenger."""

    async def work() -> None:
        here, messenger = Run(**settings), await tcp("joiner")
        try:
            await test(here, messenger)
        finally:
            await messenger.close()
            await here.close()

    run(work())


async def enter_state(here: Run, download: Download) -> int:
    """Download the state as a joiner does: fetch, catch up with the donors, verify. Returns the
    round reached.
    """
    await download.run(1)
    target = (await download.describe(None)).position.round
    reached = await download.catch_up(target)
    digests = download.digests()
    await download.describe(reached, combine_digests([digests[i] for i in PARTS]))
    return reached


def cache_in(
    folder: Path, run_name: str = "run", fingerprint: str = SPACE.fingerprint
) -> PartsCache:
    return PartsCache(folder, fingerprint, run_name)


def files(folder: Path, pattern: str = "*") -> list[Path]:
    return list(folder.glob(pattern))
