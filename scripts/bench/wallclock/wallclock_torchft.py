"""torchft's DiLoCo, with and without streaming, as a rival in scripts/bench/wallclock/wallclock.py.

Only a Python with torchft can import it. It averages as often as the config's outer section demands
and with the config's outer optimizer, but in fp32. With streaming, each layer is a fragment, and
the embedding with the head is another one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.optim import SGD
from torchft.local_sgd import DiLoCo

from scripts.bench.outer.torchft_sync import LIMIT, open_manager, start_lighthouse
from scripts.bench.wallclock.wallclock_rivals import GlobalParams, Machine, Rival, build_fragments


@contextmanager
def open_torchft(machine: Machine, *, is_streaming: bool) -> Iterator[Rival]:
    """Start this machine's island, and on the first machine also the lighthouse; wait for the other
    machines.
    """
    outer = machine.run.outer
    host = os.environ["MASTER_ADDR"]
    lighthouse = start_lighthouse(machine.count) if machine.rank == 0 else None
    manager, store = open_manager(machine.rank, machine.count, os.environ["HOST"], host)
    fragments = build_fragments(machine.model) if is_streaming else [machine.model]
    settings = {
        "lr": outer.optimizer.lr,
        "momentum": outer.optimizer.momentum,
        "nesterov": outer.optimizer.nesterov,
    }
    optimizers = [SGD(fragment.parameters(), **settings) for fragment in fragments]
    shared = GlobalParams(machine.model, optimizers)
    delay = outer.delay if is_streaming else 0
    meeting = dist.TCPStore(
        host, int(os.environ["MASTER_PORT"]), machine.count, machine.rank == 0, LIMIT
    )
    with DiLoCo(
        manager,
        fragments,
        machine.optimizer,
        optimizers,
        outer.inner_steps,
        fragment_sync_delay=delay,
    ):
        yield Rival(machine.model, global_params=shared.applied)
    manager.shutdown()
    del lighthouse, store, meeting
