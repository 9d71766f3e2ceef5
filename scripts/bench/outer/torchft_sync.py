"""torchft's DiLoCo for the benchmarks: an island of one worker, with its manager, beside the
group's lighthouse.

Imported by a Python that has torchft, see `--torchft-python`. On a CPU torchft sends fp32 only: its
quantisation needs Triton.
"""

import logging
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from scripts.bench.outer.contestants import OUTER, FakeModel, IslandSpec, build_shapes

LIMIT = timedelta(seconds=600)
"""Limit of each of torchft's waits."""
LIGHTHOUSE_PORT = 29510


def start_lighthouse(num_islands: int) -> LighthouseServer:
    """Start the group's lighthouse on LIGHTHOUSE_PORT of this host. It serves as long as it is
    referenced.
    """
    return LighthouseServer(bind=f"[::]:{LIGHTHOUSE_PORT}", min_replicas=num_islands)


def open_manager(
    index: int, num_islands: int, host: str, lighthouse: str
) -> tuple[Manager, dist.TCPStore]:
    """Open the manager of an island of one worker, and its store.

    The store serves while it is referenced. All islands must begin with equal weights, because none
    are sent at first.
    """
    logging.getLogger("torchft").setLevel(logging.WARNING)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=num_islands,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}:{LIGHTHOUSE_PORT}",
        replica_id=f"island-{index}",
        hostname=host,
        init_sync=False,
    )
    return manager, store


class TorchftSync:
    """torchft's DiLoCo. It synchronises after each step of an inner optimizer without gradients."""

    def __init__(self, spec: IslandSpec) -> None:
        self._spec = spec
        self.address = ""
        self._lighthouse = None if spec.bootstrap else start_lighthouse(spec.num_islands)
        self.bootstrap = spec.bootstrap or [spec.host]
        params = [
            torch.nn.Parameter(torch.zeros(shape))
            for shape in build_shapes(spec.num_params).values()
        ]
        self._params = torch.nn.ParameterList(params)
        self._model = FakeModel(spec, [param.data for param in params])
        self._inner = torch.optim.SGD(params, lr=1.0)

    def connect(self, addresses: list[str]) -> None:
        spec = self._spec
        self._manager, self._store = open_manager(
            spec.index, spec.num_islands, spec.host, self.bootstrap[0]
        )
        outer = torch.optim.SGD(self._params, **OUTER)
        self._diloco = DiLoCo(self._manager, [self._params], self._inner, outer, sync_every=1)
        self._diloco.__enter__()

    def prepare(self) -> None:
        self._model.train()

    def run(self, timeout_seconds: float) -> None:
        step = self._manager.current_step()
        self._inner.step()
        assert self._manager.current_step() == step + 1, "torchft has not committed the step"

    def digest(self) -> str:
        return self._model.digest()

    def sent_bytes(self) -> None:
        return None

    def close(self) -> None:
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown()
