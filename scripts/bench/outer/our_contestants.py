"""Our contestants in `scripts/bench/outer/outer.py`: the reduce alone, and the whole outer loop
around it.
"""

from dataclasses import dataclass

import torch

from outer.agreement.messages import Plan, Ready
from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.config import NETWORKS, OuterConfig
from outer.connect.opening import open_network
from outer.connect.settings import NetworkSettings
from outer.loop import build_loop
from outer.membership.rendezvous import serve_rendezvous
from outer.network.endpoints import Endpoint
from outer.network.event_loop import EventLoopThread
from outer.reduce.reducer import Reducer
from outer.space.digest import combine_digests, part_digest
from outer.space.layout import Space
from outer.space.part_sizes import choose_part_elements
from outer.space.ranks import RankGroup
from scripts.bench.outer.contestants import (
    OUTER,
    SETUP_SECONDS,
    FakeModel,
    IslandSpec,
    build_shapes,
)
from tests.outer.islands import FakeParams, identity_of
from tests.outer.nets import key_of

CLOSE_SECONDS = 10.0
MANY_ROUNDS = 100_000
"""More rounds than are ever made: the run does not end by itself."""
TOKENS = 1000
"""Tokens behind each island's contribution, which is its weight in the mean."""


@dataclass(frozen=True)
class _TensorSpec:
    name: str
    shape: tuple[int, ...]


class OurNetwork:
    """An island's network over one of our transports, and the event loop on which it lives."""

    def __init__(self, kind: str, spec: IslandSpec, tls_streams: int = 1) -> None:
        is_missing = NETWORKS[kind].meets_at == "rendezvous" and not spec.bootstrap
        self._rendezvous = serve_rendezvous(spec.host, 0) if is_missing else None
        self.bootstrap = spec.bootstrap if self._rendezvous is None else [self._rendezvous.address]
        self.loop = EventLoopThread()
        name = f"island-{spec.index}"
        settings = NetworkSettings(
            run_id="bench",
            island=name,
            rank=0,
            bootstrap=self.bootstrap,
            listen_host="127.0.0.1" if spec.relays else spec.host,
            relays=spec.relays,
            island_key=key_of(name),
            connect_seconds=SETUP_SECONDS,
            tls_streams=tls_streams,
        )
        self.network = self.loop.run(open_network(kind, settings), SETUP_SECONDS)
        self.address = self.network.transport.address
        if kind == "hivemind" and not self.bootstrap:
            self.bootstrap = self.address.partition("@")[2].split(";")

    def sent_bytes(self) -> int:
        return self.network.transport.traffic.bytes_sent

    def close(self) -> None:
        self.loop.run(self.network.close(), CLOSE_SECONDS)
        self.loop.close()
        if self._rendezvous is not None:
            self._rendezvous.close()


class OurReduce:
    """The all-to-all reduce of outer/reduce/reducer.py over one of our transports."""

    def __init__(self, kind: str, spec: IslandSpec, tls_streams: int = 1) -> None:
        self._own = OurNetwork(kind, spec, tls_streams)
        self.bootstrap = self._own.bootstrap
        self.address = self._own.address
        codec = build_codec(spec.codec)
        values = spec.values()
        part_elements = choose_part_elements(spec.num_params)
        self._space = Space(
            [_TensorSpec("all", (spec.num_params,))], part_elements, codec.block_elements
        )
        me = Endpoint(f"island-{spec.index}", 0)
        self._reducer = Reducer(
            self._own.network.transport, build_uniform_choice(codec), self._space, me
        )
        self._parts = {part.index: values[part.start : part.stop] for part in self._space.parts}
        self._round = 0

    def connect(self, addresses: list[str]) -> None:
        self._addresses = addresses
        named = {Endpoint(f"island-{i}", 0): address for i, address in enumerate(addresses)}
        self._own.loop.run(self._own.network.transport.connect("bench", named), SETUP_SECONDS)

    def prepare(self) -> None:
        self._round += 1
        self._plan = Plan(
            round=self._round,
            attempt=0,
            planner="island-0",
            participants=[self._ready(i, address) for i, address in enumerate(self._addresses)],
        )

    def run(self, timeout_seconds: float) -> None:
        self._means = self._own.loop.run(
            self._reducer.run(self._plan, self._parts), timeout_seconds
        )

    def digest(self) -> str:
        return combine_digests(
            [part_digest(self._means[part].payload) for part in sorted(self._means)]
        )

    def sent_bytes(self) -> int:
        return self._own.sent_bytes()

    def close(self) -> None:
        self._own.close()

    def _ready(self, index: int, address: str) -> Ready:
        return Ready(
            island=f"island-{index}",
            incarnation=f"{index:08x}",
            key=f"{index:064x}",
            round=self._round,
            attempt=0,
            tokens=TOKENS,
            weight=TOKENS,
            base_tokens=0,
            digest="0" * 32,
            carriers=[(0, len(self._space.parts))],
            transport_addresses=[address],
            control_addresses=[address],
        )


class OurSync:
    """Our outer loop: snapshot, plan, reduce, outer step, digest of the state, vote, merge."""

    def __init__(self, kind: str, spec: IslandSpec) -> None:
        self._own = OurNetwork(kind, spec)
        self._name = f"island-{spec.index}"
        self.bootstrap = self._own.bootstrap
        self.address = self._own.address
        settings = {
            "transport": kind,
            "codec": spec.codec,
            "start_islands": spec.num_islands,
            "rounds": MANY_ROUNDS,
        }
        self._config = OuterConfig.model_validate(settings | {"optimizer": OUTER})
        shapes = build_shapes(spec.num_params)
        self._params = FakeParams({name: torch.zeros(shape) for name, shape in shapes.items()})
        self._model = FakeModel(spec, self._params.values)

    def connect(self, addresses: list[str]) -> None:
        """Enter the run together with the others."""
        identity = identity_of(self._name)
        own = self._own
        self._outer = build_loop(
            self._config, identity, self._params, RankGroup(), own.network, own.loop
        )
        self._outer.begin()

    def prepare(self) -> None:
        self._model.train()

    def run(self, timeout_seconds: float) -> None:
        self._outer.launch(TOKENS)
        reports = self._outer.land().reports
        assert len(reports) == 1, (
            f"committed at its attempt number {len(reports)}: {reports[0].cause}"
        )

    def digest(self) -> str:
        return self._model.digest()

    def sent_bytes(self) -> int:
        return self._own.sent_bytes()

    def close(self) -> None:
        self._outer.leave()
        self._own.close()
