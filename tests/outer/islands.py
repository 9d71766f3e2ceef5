"""Support for tests of the outer loop: params without a model, and islands as threads over a
loopback hub.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from inner.expert_names import expert_place
from outer.agreement.running.peers import Identity
from outer.config import OuterConfig
from outer.connect.opening import open_network
from outer.connect.settings import Network, NetworkSettings
from outer.errors import BehindError, MessageError
from outer.hooks import NO_HOOKS, Hooks
from outer.loop import OuterLoop, build_loop
from outer.network.endpoints import Endpoint, Tag
from outer.network.event_loop import EventLoopThread
from outer.report import LoopSettings, RoundReport
from outer.rounds.agreed import AgreedAverager
from outer.space.layout import matrix_shape
from outer.space.ranks import RankGroup
from outer.state.pseudo_gradient import Contribution
from outer.transports.base import Transport
from outer.transports.loopback import Hub
from tests.outer.nets import key_of

GUARD_SECONDS = 40.0


@dataclass(frozen=True)
class Spec:
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]

    @property
    def expert(self) -> tuple[int, int] | None:
        """As of `inner.param_spec.ParamSpec`."""
        return expert_place(self.name)


@dataclass(frozen=True)
class Held:
    """A rectangle of it that a rank holds."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]


class FakeParams:
    """What `inner.params.LocalParams` offers, of plain matrices: this rank's copy of each slice in
    `slices`.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], slices: Sequence[Held] | None = None
    ) -> None:
        # Moments follow from the params and the config; buffers are specs of their own.
        kinds = ("", "buffer", "donor_buffer")
        named = [
            (name, values) for name, values in tensors.items() if name.partition("@")[2] in kinds
        ]
        self.specs = [Spec(name, tuple(values.shape)) for name, values in named]
        matrices = {name: as_matrix(values) for name, values in tensors.items()}
        whole = [Held(name, (0, m.shape[0]), (0, m.shape[1])) for name, m in matrices.items()]
        self.slices = whole if slices is None else list(slices)
        self.values = [
            matrices[s.name][slice(*s.rows), slice(*s.cols)].clone() for s in self.slices
        ]

    def read_all(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        return {index: self.values[index] for index in indices}

    def write_all(self, values: Mapping[int, torch.Tensor]) -> None:
        for index, new in values.items():
            assert new.shape == self.values[index].shape
            self.values[index].copy_(new)

    def pinned(self, index: int) -> None:
        return None

    def live(self, index: int) -> torch.Tensor:
        return self.values[index]

    def flat(self) -> torch.Tensor:
        """All that this rank holds, one after the other."""
        return torch.cat([values.flatten() for values in self.values])


def as_matrix(values: torch.Tensor) -> torch.Tensor:
    """As the canonical space sees a parameter."""
    return values.reshape(matrix_shape(tuple(values.shape)))


@dataclass
class Island:
    """One rank of an island; most islands here have one rank, in a thread of its own."""

    name: str
    params: FakeParams
    outer: OuterLoop
    network: Network | None = None

    def train(self, round_number: int) -> torch.Tensor:
        """Fake inner steps: add this island's `progress` of the round; the local params
        afterwards.
        """
        for held, values in zip(self.params.slices, self.params.values, strict=True):
            values.add_(progress(self.name, round_number, held.name, values))
        return self.params.flat()

    def round(self, tokens: int = 100) -> RoundReport:
        """Train and average; the report of the attempt that committed."""
        self.train(self.outer.position.round)
        return self.commit(tokens)

    def commit(self, tokens: int = 100) -> RoundReport:
        """Attempts, until one commits."""
        while not (report := self.attempt(tokens)).is_committed:
            pass
        return report

    def attempt(self, tokens: int) -> RoundReport:
        """One attempt at the next round, waited for. Not committed: nothing has changed, call it
        again.
        """
        return attempt(self.outer, tokens)

    def state(self) -> list[bytes]:
        """Position, global params and momentum, part by part, as a joiner would get them."""
        return [
            self.outer.replica.carried.pack(part.index) for part in self.outer.replica.space.parts
        ]


def attempt(outer: OuterLoop, tokens: int) -> RoundReport:
    """One attempt at the next agreed round, which `OuterLoop` repeats in the background until one
    commits.
    """
    assert isinstance(outer.averager, AgreedAverager)
    snapshot = outer.pending.snapshot(outer.round, tokens)
    try:
        report = outer.averager.runner.attempt(Contribution(snapshot))
    except BehindError as behind:
        if (caught := outer.catch_up(behind, snapshot.weight)) is None:
            return attempt(outer, tokens)
        raise caught from None
    if report.is_committed:
        outer.merge(snapshot)
    return report


def tensors(seed: int = 0, scale: int = 1) -> dict[str, torch.Tensor]:
    """A model's initial params, about 130 x scale elements."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (13 * scale, 7), "wq": (5, 4 * scale), "bias": (9 * scale,), "gain": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def progress(island: str, round_number: int, name: str, like: torch.Tensor) -> torch.Tensor:
    """What fake inner steps add to a parameter: the same whenever it is asked for, another for each
    island.
    """
    seed = int.from_bytes(hashlib.sha256(f"{island} {round_number} {name}".encode()).digest()[:7])
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)) * 0.01


def identity_of(name: str) -> Identity:
    """Of a test's island: its name in hex is its incarnation."""
    number = name.encode().hex().zfill(8)
    return Identity(
        island=name, incarnation=number, identity=key_of(name).public, config_hash="c" * 32
    )


Wrap = Callable[[Hub, Transport], Transport]
T = TypeVar("T")


def run_islands(
    scripts: Mapping[str, Callable[[Island], T]],
    config: OuterConfig,
    *,
    model: Callable[[], dict[str, torch.Tensor]] = tensors,
    hub: Hub | None = None,
    faults: Mapping[str, Wrap] | None = None,
    hooks: Mapping[str, Hooks] | None = None,
    clocks: Mapping[str, Callable[[], float]] | None = None,
    experts_per_token: int = 0,
) -> dict[str, T]:
    """What each island's script returns; an exception of any is raised here, once all have
    ended.
    """
    hub, faults, hooks, clocks = hub or Hub(), faults or {}, hooks or {}, clocks or {}
    # The first optimizer imports half of torch; from several threads at once that corrupts Python
    # 3.11's parser.
    torch.optim.SGD([torch.zeros(1)])
    with ThreadPoolExecutor(len(scripts)) as pool:
        live = {
            name: pool.submit(
                _live,
                name,
                script,
                config,
                model(),
                hub,
                faults.get(name),
                LoopSettings(
                    hooks=hooks.get(name, NO_HOOKS),
                    index=index,
                    now=clocks.get(name, time.monotonic),
                    experts_per_token=experts_per_token,
                ),
            )
            for index, (name, script) in enumerate(scripts.items())
        }
        return {name: future.result(GUARD_SECONDS) for name, future in live.items()}


def _live(
    name: str,
    script: Callable[[Island], T],
    config: OuterConfig,
    model: dict[str, torch.Tensor],
    hub: Hub,
    fault: Wrap | None,
    own: LoopSettings,
) -> T:
    loop = EventLoopThread()
    settings = NetworkSettings(
        "run", name, 0, hub=hub, connect_seconds=GUARD_SECONDS, island_key=key_of(name)
    )
    network = loop.run(open_network("loopback", settings), GUARD_SECONDS)
    try:
        if fault is not None:
            network.transport = fault(hub, network.transport)
        identity = identity_of(name)
        params = FakeParams(model)
        outer = build_loop(config, identity, params, RankGroup(), network, loop, own)
        return script(Island(name, params, outer, network))
    finally:
        loop.run(network.close(), GUARD_SECONDS)
        loop.close()


class ForwardingTransport:
    """A transport that hands everything to another one. Subclasses falsify some of it."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.traffic, self.address, self.is_uneven = inner.traffic, inner.address, inner.is_uneven

    async def connect(self, epoch: str, addresses: Mapping[Endpoint, str]) -> None:
        await self.inner.connect(epoch, addresses)

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        await self.inner.send(to, tag, payload)

    async def recv(self, source: Endpoint, tag: Tag, num_bytes: int) -> torch.Tensor:
        return await self.inner.recv(source, tag, num_bytes)

    async def disconnect(self) -> None:
        await self.inner.disconnect()

    async def close(self) -> None:
        await self.inner.close()


class FailingTransport(ForwardingTransport):
    """A transport on which one send fails: the first of `attempt`; with `is_fatal` the island dies
    there.
    """

    def __init__(
        self, hub: Hub, inner: Transport, attempt: tuple[int, int], *, is_fatal: bool
    ) -> None:
        super().__init__(inner)
        self._hub, self._attempt, self._is_fatal = hub, attempt, is_fatal

    async def send(self, to: Endpoint, tag: Tag, payload: torch.Tensor) -> None:
        if (tag.round, tag.attempt) == self._attempt:
            if self._is_fatal:
                self._hub.lose(self.address.removeprefix("loopback:").split("/")[0])
            raise MessageError("this send fails")
        await super().send(to, tag, payload)


def dies_in(round_number: int) -> Wrap:
    """The island is gone at its first send of the round's first attempt."""
    return lambda hub, inner: FailingTransport(hub, inner, (round_number, 0), is_fatal=True)


def fails_in(round_number: int) -> Wrap:
    """The round's first attempt fails on the island, which lives."""
    return lambda hub, inner: FailingTransport(hub, inner, (round_number, 0), is_fatal=False)
