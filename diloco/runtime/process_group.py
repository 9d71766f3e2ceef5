"""The device and the torch.distributed process groups of one rank."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError
from diloco.runtime.rank_launcher import STORE
from outer.space.ranks import RankGroup

GROUP_SECONDS = 1800.0
"""Time-out of the collectives among an island's ranks. Waits of the outer loop have deadlines of their own."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def pick_device(island: IslandConfig) -> str:
    """`cpu` or `cuda:<local rank>`. Raises ConfigError if the config asks for CUDA and there is none."""
    if island.device == "cpu" or (island.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigError("island.device is 'cuda', but torch finds no CUDA device; use auto or cpu")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


@contextmanager
def open_process_group(island: IslandConfig, device: str) -> Iterator[RankGroup]:
    """Initialise torch.distributed for the island's ranks and yield their RankGroup. Every rank must enter it."""
    torch.set_num_threads(1) if device == "cpu" else torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    backend, timeout = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timedelta(seconds=GROUP_SECONDS)
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE"):
        # On one node no other machine has to reach a rank, whatever interface the cluster's settings name.
        os.environ |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    store, rank, size = find_store(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if dist.get_world_size() != island.ranks:
        raise ConfigError(
            f"island.ranks is {island.ranks}, but {dist.get_world_size()} processes were started; "
            f"start the island with `diloco launch`, or set island.ranks={dist.get_world_size()}"
        )
    if island.ranks == 1:
        yield RankGroup()
        return
    names = "the rank group", "the rank group in background"
    group, background = (dist.new_group(backend="gloo", timeout=timeout, group_desc=name) for name in names)
    assert not isinstance(group, int) and not isinstance(background, int), "every rank is in the group of all ranks"
    yield RankGroup(group, background)


def find_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store in which the island's ranks meet, this process's rank, and their number."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size == 1:
        return dist.HashStore(), rank, size
    if STORE in os.environ:
        return dist.FileStore(os.environ[STORE]), rank, size
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun keeps its store over restarts. The prefix hides the keys of earlier incarnations.
    return dist.PrefixStore(f"life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store), rank, size
