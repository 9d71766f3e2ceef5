"""The device and the torch.distributed process groups of one rank."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError
from diloco.runtime.devices.choice import choose_device, explain_cpu, fit_compute_dtype
from diloco.runtime.devices.gpus import list_cards, list_gpus
from diloco.runtime.rank_launcher import STORE
from outer.space.ranks import RankGroup
from outer.transports.gloo.open_files import allow_many_files

GROUP_SECONDS = 1800.0
"""Time limit of the collectives among an island's ranks. Waits of the outer loop have their own
deadlines."""
LOCAL_SIZE = "LOCAL_WORLD_SIZE"
DEVICE_KEY = "device"
LAZY_RANKS = 32
"""With at least this many ranks, gloo connects two ranks when they first communicate, and not every
pair at the start. Measured with 128 ranks: each rank has 5 sockets per group instead of 128."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

log = logging.getLogger(__name__)


def pick_device(island: IslandConfig) -> str:
    """Return the device of this rank. The node's first rank logs why it is the CPU. Raises
    ConfigError as choose_device.
    """
    local_rank, num_local_ranks = (
        int(os.environ.get(name, n)) for name, n in (("LOCAL_RANK", 0), (LOCAL_SIZE, 1))
    )
    num_gpus = 0 if island.device == "cpu" else len(list_gpus())
    device = choose_device(island.device, local_rank, num_local_ranks, num_gpus)
    if local_rank == 0 and (why := explain_cpu(island.device, num_local_ranks, num_gpus)):
        log.log(logging.WARNING if num_gpus else logging.INFO, why)
    return device


def fit_to_device(island: IslandConfig, device: str) -> IslandConfig:
    """Return the island with a dtype that its device supports. The node's first rank logs a change.
    Raises ConfigError.
    """
    # The driver is queried because torch would open a context on the first GPU in every rank.
    cards = () if device == "cpu" else list_cards()
    number = int(device.partition(":")[2] or 0)
    if number >= len(cards):
        return island
    fitted = fit_compute_dtype(island, cards[number])
    if fitted is not island and os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning(
            "island.compute_dtype is 'auto' and %s has no bf16: computing in float32",
            cards[number].name,
        )
    return fitted


@contextmanager
def open_process_group(island: IslandConfig, device: str) -> Iterator[RankGroup]:
    """Initialise torch.distributed for the island's ranks and yield their RankGroup. Every rank
    must enter the block.
    """
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision(island.matmul_precision)
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", LOCAL_SIZE: "1"}
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=GROUP_SECONDS)
    if os.environ["WORLD_SIZE"] == os.environ.get(LOCAL_SIZE):
        # On one node only local ranks connect, so loopback is used even if the cluster's settings
        # name another interface.
        os.environ |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    allow_many_files()
    # torch reads this variable when the first group is created.
    if int(os.environ["WORLD_SIZE"]) >= LAZY_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if os.environ["WORLD_SIZE"] == "1":
        # NCCL's monitor aborts a process whose heartbeat has stopped for 8 minutes. A single rank
        # waits for no other, so its heartbeat stops only while the process is frozen, and the
        # monitor would abort it when it continues.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    store, rank, size = find_store(timeout)
    check_same_device(store, rank, device)
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
    group, background = (
        dist.new_group(backend="gloo", timeout=timeout, group_desc=name) for name in names
    )
    assert not isinstance(group, int) and not isinstance(background, int), (
        "every rank is in the group of all ranks"
    )
    yield RankGroup(group, background)


def check_same_device(store: dist.Store, rank: int, device: str) -> None:
    """Raise ConfigError if this rank and rank 0 compute on different kinds of devices. Every rank
    must call it.
    """
    kind = device.split(":")[0]
    if rank == 0:
        store.set(DEVICE_KEY, kind)
    elif (first := store.get(DEVICE_KEY).decode()) != kind:
        raise ConfigError(
            f"rank {rank} of the island computes on {kind}, and rank 0 on {first}: its nodes have "
            "different numbers of "
            "GPUs; start as many ranks on each node as it has GPUs, or set island.device to cpu"
        )


def find_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store through which the island's ranks connect, this process's rank, and the
    number of ranks.
    """
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    if size == 1:
        return dist.HashStore(), rank, size
    if STORE in os.environ:
        return dist.FileStore(os.environ[STORE]), rank, size
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    # torchrun keeps its store over restarts. The prefix hides the keys of earlier incarnations.
    return (
        dist.PrefixStore(f"life-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store),
        rank,
        size,
    )
