"""The rivals in `scripts/bench/outer/outer.py`: torch's all_reduce, hivemind's averager and DiLoCo
in plain torch.
"""

import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from scripts.bench.outer.contestants import (
    OUTER,
    SETUP_SECONDS,
    FakeModel,
    IslandSpec,
    WrongResult,
    build_shapes,
    open_store,
)


class Torch:
    """torch.distributed.all_reduce of one flat tensor over gloo."""

    DTYPES: ClassVar = {"fp32": torch.float32, "bf16": torch.bfloat16}

    def __init__(self, seat: IslandSpec) -> None:
        self._seat = seat
        self._own = seat.values().to(self.DTYPES[seat.codec])
        self._store, self.bootstrap = open_store(seat)
        self.address = ""

    def connect(self, addresses: list[str]) -> None:
        dist.init_process_group(
            "gloo", store=self._store, rank=self._seat.index, world_size=self._seat.num_islands
        )

    def prepare(self) -> None:
        self._values = self._own.clone()

    def run(self, timeout_seconds: float) -> None:
        dist.all_reduce(self._values)

    def digest(self) -> str:
        return ""

    def sent_bytes(self) -> None:
        return None

    def close(self) -> None:
        dist.destroy_process_group()


class Averager:
    """hivemind's DecentralizedAverager. Matchmaking finishes before the measurement starts."""

    COMPRESSION: ClassVar = {
        "fp32": "NoCompression",
        "bf16": "Float16Compression",
        "int8": "Uniform8BitQuantization",
    }
    """hivemind's closest equivalent of each of our codecs."""

    def __init__(self, seat: IslandSpec) -> None:
        import hivemind

        self._hivemind = hivemind
        self._seat = seat
        self._own = seat.values()
        # hivemind's 8-bit codecs call int() on arrays of one element, which numpy 2.4 refuses.
        hivemind.compression.quantization.int = lambda value: getattr(
            value, "item", lambda: int(value)
        )()
        self._dht = hivemind.DHT(
            host_maddrs=[f"/ip4/{seat.host}/tcp/0"],
            initial_peers=seat.bootstrap or None,
            nat_port_map=False,
            auto_nat=False,
            start=True,
        )
        self.bootstrap = [str(address) for address in self._dht.get_visible_maddrs()]
        self.address = ""
        self._averager = None

    def connect(self, addresses: list[str]) -> None:
        """Start the averager. Peers connect by matchmaking."""
        self._averager = self._start(self._seat.codec)

    def prepare(self) -> None:
        with self._averager.get_tensors() as (tensor,):
            tensor.copy_(self._own)
        self._step = self._averager.step(
            wait=False, require_trigger=True, timeout=SETUP_SECONDS, allow_retries=False
        )
        deadline = time.monotonic() + SETUP_SECONDS
        while self._step.stage != self._hivemind.averaging.control.AveragingStage.AWAITING_TRIGGER:
            if self._step.done() or time.monotonic() > deadline:
                raise RuntimeError("the averager's matchmaking found no group")
            time.sleep(0.02)

    def run(self, timeout_seconds: float) -> None:
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

    def _start(self, codec: str) -> Any:
        return self._hivemind.DecentralizedAverager(
            [torch.zeros(self._seat.num_params)],
            self._dht,
            prefix=f"bench-{codec}",
            target_group_size=self._seat.num_islands,
            min_group_size=self._seat.num_islands,
            min_matchmaking_time=2.0,
            compression=getattr(self._hivemind.compression, self.COMPRESSION[codec])(),
            allow_state_sharing=False,
            start=True,
        )


class PlainSync:
    """DiLoCo in plain torch: the mean of the pseudo-gradients by all_reduce over gloo, then SGD and
    a copy.
    """

    def __init__(self, spec: IslandSpec) -> None:
        self._group = Torch(spec)
        self.bootstrap = self._group.bootstrap
        self.address = ""
        self._num_islands = spec.num_islands
        self._params = [
            torch.nn.Parameter(torch.zeros(shape))
            for shape in build_shapes(spec.num_params).values()
        ]
        self._optimizer = torch.optim.SGD(self._params, **OUTER)
        self._model = FakeModel(spec, [torch.zeros_like(param) for param in self._params])

    def connect(self, addresses: list[str]) -> None:
        self._group.connect(addresses)

    def prepare(self) -> None:
        self._model.train()

    def run(self, timeout_seconds: float) -> None:
        for param, local in zip(self._params, self._model.tensors, strict=True):
            param.grad = param.detach() - local
            dist.all_reduce(param.grad)
            param.grad /= self._num_islands
        self._optimizer.step()
        for param, local in zip(self._params, self._model.tensors, strict=True):
            local.copy_(param.detach())

    def digest(self) -> str:
        return self._model.digest()

    def sent_bytes(self) -> None:
        return None

    def close(self) -> None:
        self._group.close()
