"""Which device each rank computes on, as the config and the number of the machine's GPUs decide it.

Importing this does not import torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError

DeviceSetting = Literal["auto", "cpu", "cuda"]
VISIBLE = "CUDA_VISIBLE_DEVICES"
DRIVERS = "/dev/nvidiactl", "/dev/dxg", "/dev/kfd"
"""One of these exists if there is a driver that torch could use: NVIDIA's, that of WSL, AMD's."""


def list_gpus() -> list[str]:
    """The GPUs that torch may use on this machine, as CUDA_VISIBLE_DEVICES names them. Initialises none of them."""
    visible = os.environ.get(VISIBLE)
    if visible == "" or not any(Path(driver).exists() for driver in DRIVERS):
        return []
    import torch

    count = torch.cuda.device_count()
    return [str(number) for number in range(count)] if visible is None else visible.split(",")[:count]


def choose_device(setting: DeviceSetting, local_rank: int, num_local_ranks: int, num_gpus: int) -> str:
    """`cpu` or `cuda:<local rank>`, of the same kind for all ranks of a node.

    `auto` is CUDA if the node has a GPU for each of its ranks. Raises ConfigError for `cuda` if it has not.
    """
    is_enough = num_gpus >= num_local_ranks
    if setting == "cpu" or (setting == "auto" and not is_enough):
        return "cpu"
    if not is_enough:
        raise ConfigError(
            f"island.device is 'cuda' with {num_local_ranks} ranks on this machine, and torch finds {num_gpus} GPUs; "
            f"each rank needs one: {_fewer_ranks(num_gpus)}set island.device to auto or cpu"
        )
    return f"cuda:{local_rank}"


def explain_cpu(setting: DeviceSetting, num_local_ranks: int, num_gpus: int) -> str | None:
    """Why `auto` chose the CPU, in one line; None if the config asks for a device or there are GPUs enough."""
    if setting != "auto" or num_gpus >= num_local_ranks:
        return None
    if num_gpus == 0:
        return "island.device is 'auto' and torch finds no GPU: computing on the CPU"
    return (
        f"island.device is 'auto' and torch finds {num_gpus} GPUs for {num_local_ranks} ranks: computing on the CPU; "
        f"to use the GPUs, {_fewer_ranks(num_gpus)}give each rank one"
    )


def _fewer_ranks(num_gpus: int) -> str:
    return f"set island.ranks={num_gpus} or " if num_gpus else ""


@dataclass
class GpuShares:
    """The GPUs of one machine, as CUDA_VISIBLE_DEVICES names them: those of each island, by its index, and the rest."""

    by_island: dict[int, tuple[str, ...]] = field(default_factory=dict)
    spare: tuple[str, ...] = ()

    def give_spare(self, index: int, island: IslandConfig) -> None:
        """Give an island that joins a GPU for each rank, if so many are left. One that had some keeps them."""
        if index not in self.by_island:
            count = island.ranks if island.device != "cpu" and len(self.spare) >= island.ranks else 0
            self.by_island[index], self.spare = self.spare[:count], self.spare[count:]

    def environment(self, index: int | str) -> dict[str, str]:
        """What an island's processes need so that they see its GPUs only, numbered from 0. Others see all."""
        return {VISIBLE: ",".join(self.by_island[index])} if isinstance(index, int) and index in self.by_island else {}


def share_gpus(islands: Sequence[IslandConfig], gpus: Sequence[str]) -> GpuShares:
    """A GPU for each rank of each island, in order, or none for an island that gets the CPU.

    The islands whose device is `auto` all get GPUs, or all the CPU if the GPUs do not suffice. Raises ConfigError if
    they do not suffice for the islands whose device is `cuda`.
    """
    if (asked := count_ranks(islands, ("cuda",))) > len(gpus):
        raise ConfigError(
            f"island.device is 'cuda' for {asked} ranks of the islands together, and torch finds {len(gpus)} GPUs on "
            "this machine; start fewer islands (--islands) or ranks (--ranks), or set island.device to auto or cpu"
        )
    on_gpu = ("cuda", "auto") if count_ranks(islands, ("cuda", "auto")) <= len(gpus) else ("cuda",)
    shares, first = {}, 0
    for index, island in enumerate(islands):
        count = island.ranks if island.device in on_gpu else 0
        shares[index] = tuple(gpus[first : first + count])
        first += count
    return GpuShares(shares, tuple(gpus[first:]))


def explain_shares(islands: Sequence[IslandConfig], gpus: Sequence[str]) -> str | None:
    """Why islands compute on the CPU of a machine with GPUs, in one line; None if they do not."""
    wanted = count_ranks(islands, ("auto", "cuda"))
    if not 0 < len(gpus) < wanted:
        return None
    return (
        f"the islands have {wanted} ranks together and this machine {len(gpus)} GPUs: islands whose island.device is "
        "auto compute on the CPU; with fewer --islands or --ranks they compute on the GPUs"
    )


def count_ranks(islands: Sequence[IslandConfig], settings: Sequence[DeviceSetting]) -> int:
    """Number of ranks of the islands whose device is one of `settings`."""
    return sum(island.ranks for island in islands if island.device in settings)
