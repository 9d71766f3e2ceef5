"""The contestants of `scripts/bench/outer.py`, each as one island of a group."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch

from outer.agreement.messages import Plan, Ready
from outer.codecs import build_codec
from outer.codecs.choice import build_uniform_choice
from outer.config import OuterConfig
from outer.connect import Network, NetworkSettings, open_network
from outer.network.endpoints import Endpoint
from outer.network.event_loop import EventLoopThread
from outer.reduce.reducer import Reducer
from outer.space.digest import combine_digests
from outer.space.layout import Space

SETUP_SECONDS = 60.0


class WrongResult(Exception):
    """The reduce reported success, but its result is not the mean."""


@dataclass(frozen=True)
class IslandSpec:
    """One island of the group."""

    index: int
    num_islands: int
    num_params: int
    host: str
    bootstrap: list[str]
    """The `bootstrap` of island 0; empty for island 0 itself."""

    def values(self) -> torch.Tensor:
        """This island's fp32 values, equal in every repeat."""
        generator = torch.Generator().manual_seed(self.index)
        return torch.randn(self.num_params, generator=generator).mul_(1e-3)


class Contestant(Protocol):
    """One implementation of a reduce, on one island. Every island must call the same methods in the same order."""

    bootstrap: list[str]
    """Addresses that the other islands need to join the group."""
    address: str

    def connect(self, addresses: list[str]) -> None:
        """Connect to the other islands. `addresses` holds every island's address in order."""
        ...

    def prepare(self, codec: str) -> None:
        """Prepare the next reduce. This is not measured."""
        ...

    def reduce(self, timeout_seconds: float) -> None:
        """Run the reduce. This is measured."""
        ...

    def digest(self) -> str:
        """Digest of the result if all islands must have equal bits, else "". Raises WrongResult."""
        ...

    def sent_bytes(self) -> int | None:
        """Bytes sent so far by the contestant's own count, or None if it has no counter."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _TensorSpec:
    name: str
    shape: tuple[int, ...]


@dataclass
class _PreparedReduce:
    """Our reduce for one codec. `reducer.run` may be repeated with the next round's plan."""

    reducer: Reducer
    parts: dict[int, torch.Tensor]
    carriers: list[tuple[int, int]] = field(default_factory=list)


class Ours:
    """The all-to-all reduce of outer/reduce/reducer.py over one of our transports."""

    def __init__(self, kind: str, seat: IslandSpec) -> None:
        self._kind, self._seat = kind, seat
        self._rendezvous = None
        self.bootstrap = list(seat.bootstrap)
        if kind == "gloo" and not self.bootstrap:
            from outer.membership.rendezvous import serve_rendezvous

            self._rendezvous = serve_rendezvous(seat.host, 0)
            self.bootstrap = [self._rendezvous.address]
        self._loop = EventLoopThread()
        self._network = self._open()
        self.address = self._network.transport.address
        if kind == "hivemind" and not self.bootstrap:
            self.bootstrap = self.address.partition("@")[2].split(";")
        self._values = seat.values()
        self._setups: dict[str, _PreparedReduce] = {}
        self._round = 0

    def connect(self, addresses: list[str]) -> None:
        self._addresses = addresses
        named = {Endpoint(f"island-{i}", 0): address for i, address in enumerate(addresses)}
        self._loop.run(self._network.transport.connect("bench", named), SETUP_SECONDS)

    def prepare(self, codec: str) -> None:
        if codec not in self._setups:
            self._setups = {codec: self._set_up(codec)}
        self._setup = self._setups[codec]
        self._round += 1
        self._plan = Plan(
            round=self._round,
            attempt=0,
            planner="island-0",
            participants=[self._ready(i, address) for i, address in enumerate(self._addresses)],
        )

    def reduce(self, timeout_seconds: float) -> None:
        self._means = self._loop.run(self._setup.reducer.run(self._plan, self._setup.parts), timeout_seconds)

    def digest(self) -> str:
        return combine_digests([self._means[part].digest for part in sorted(self._means)])

    def sent_bytes(self) -> int:
        return self._network.transport.traffic.bytes_sent

    def close(self) -> None:
        self._loop.run(self._network.close(), 10)
        self._loop.close()
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _open(self) -> Network:
        settings = NetworkSettings(
            run_id="bench",
            island=f"island-{self._seat.index}",
            rank=0,
            bootstrap=self.bootstrap,
            listen_host=self._seat.host,
            connect_seconds=SETUP_SECONDS,
        )
        return self._loop.run(open_network(self._kind, settings), SETUP_SECONDS)

    def _set_up(self, name: str) -> _PreparedReduce:
        codec = build_codec(name)
        specs = [_TensorSpec("all", (self._seat.num_params,))]
        space = Space(specs, OuterConfig().part_elements, codec.block_elements)
        me = Endpoint(f"island-{self._seat.index}", 0)
        return _PreparedReduce(
            Reducer(self._network.transport, build_uniform_choice(codec), space, me),
            {part.index: self._values[part.start : part.stop] for part in space.parts},
            [(0, len(space.parts))],
        )

    def _ready(self, index: int, address: str) -> Ready:
        return Ready(
            island=f"island-{index}",
            incarnation=f"{index:08x}",
            key=f"{index:064x}",
            round=self._round,
            attempt=0,
            tokens=1000,
            weight=1000,
            base_tokens=0,
            digest="0" * 32,
            carriers=self._setup.carriers,
            transport_addresses=[address],
            control_addresses=[address],
        )


class Torch:
    """torch.distributed.all_reduce of one flat tensor over gloo."""

    DTYPES: ClassVar = {"fp32": torch.float32, "bf16": torch.bfloat16}

    def __init__(self, seat: IslandSpec) -> None:
        import torch.distributed as dist

        self._dist, self._seat, self._own = dist, seat, seat.values()
        if seat.bootstrap:
            host, _, port = seat.bootstrap[0].rpartition(":")
            self._store = dist.TCPStore(host, int(port), is_master=False)
        else:
            self._store = dist.TCPStore(seat.host, 0, is_master=True, wait_for_workers=False)
        self.bootstrap = seat.bootstrap or [f"{seat.host}:{self._store.port}"]
        self.address = ""

    def connect(self, addresses: list[str]) -> None:
        self._dist.init_process_group(
            "gloo", store=self._store, rank=self._seat.index, world_size=self._seat.num_islands
        )

    def prepare(self, codec: str) -> None:
        self._values = self._own.to(self.DTYPES[codec], copy=True)

    def reduce(self, timeout_seconds: float) -> None:
        self._dist.all_reduce(self._values)

    def digest(self) -> str:
        return ""

    def sent_bytes(self) -> None:
        return None

    def close(self) -> None:
        self._dist.destroy_process_group()


class Averager:
    """hivemind's DecentralizedAverager. Matchmaking finishes before the measurement starts."""

    def __init__(self, seat: IslandSpec) -> None:
        import hivemind

        self._hivemind, self._seat, self._own = hivemind, seat, seat.values()
        # Its 8-bit codecs call int() on arrays of one element, which numpy 2.4 refuses.
        hivemind.compression.quantization.int = lambda value: getattr(value, "item", lambda: int(value))()
        self._dht = hivemind.DHT(
            host_maddrs=[f"/ip4/{seat.host}/tcp/0"],
            initial_peers=seat.bootstrap or None,
            nat_port_map=False,
            auto_nat=False,
            start=True,
        )
        self.bootstrap = [str(address) for address in self._dht.get_visible_maddrs()]
        self.address = ""
        self._codec, self._averager = "", None

    def connect(self, addresses: list[str]) -> None:
        """Do nothing: peers connect by matchmaking."""

    def prepare(self, codec: str) -> None:
        if codec != self._codec:
            self._start(codec)
        with self._averager.get_tensors() as (tensor,):
            tensor.copy_(self._own)
        self._step = self._averager.step(wait=False, require_trigger=True, timeout=SETUP_SECONDS, allow_retries=False)
        deadline = time.monotonic() + SETUP_SECONDS
        while self._step.stage != self._hivemind.averaging.control.AveragingStage.AWAITING_TRIGGER:
            if self._step.done() or time.monotonic() > deadline:
                raise RuntimeError("the averager's matchmaking found no group")
            time.sleep(0.02)

    def reduce(self, timeout_seconds: float) -> None:
        self._step.allow_allreduce()
        self._gathered = self._step.result(timeout_seconds)

    def digest(self) -> str:
        with self._averager.get_tensors() as (tensor,):
            left = (tensor == self._own).float().mean().item()
        if len(self._gathered) != self._seat.num_islands or left > 0.01:
            raise WrongResult(f"{left:.0%} not averaged, by a group of {len(self._gathered)}")
        return ""

    def sent_bytes(self) -> None:
        return None

    def close(self) -> None:
        if self._averager is not None:
            self._averager.shutdown()
        self._dht.shutdown()

    def _start(self, codec: str) -> None:
        if self._averager is not None:
            self._averager.shutdown()
        compression = {"none": "NoCompression", "fp16": "Float16Compression", "uniform8": "Uniform8BitQuantization"}
        self._codec = codec
        self._averager = self._hivemind.DecentralizedAverager(
            [torch.zeros(self._seat.num_params)],
            self._dht,
            prefix=f"bench-{codec}",
            target_group_size=self._seat.num_islands,
            min_group_size=self._seat.num_islands,
            min_matchmaking_time=2.0,
            compression=getattr(self._hivemind.compression, compression[codec])(),
            allow_state_sharing=False,
            start=True,
        )


BUILDERS: dict[str, Callable[[IslandSpec], Contestant]] = {
    "torch": Torch,
    "gloo": lambda seat: Ours("gloo", seat),
    "hivemind": lambda seat: Ours("hivemind", seat),
    "averager": Averager,
}
