"""Divide the GPUs of one machine among all islands of a run. Importing this does not import torch.

NCCL refuses two ranks of one group on the same GPU. An island of one rank is a group of one, so
such islands may share a GPU.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError
from diloco.runtime.devices.choice import DeviceSetting, choose_device, fit_compute_dtype
from diloco.runtime.devices.cuda_driver import Card
from diloco.runtime.devices.gpus import SHARERS, VISIBLE, describe_gpus


@dataclass
class GpuShares:
    """The GPUs of one machine, as CUDA_VISIBLE_DEVICES names them: the GPUs of each island by its
    index, and the spare.
    """

    by_island: dict[int, tuple[str, ...]] = field(default_factory=dict)
    spare: tuple[str, ...] = ()

    @property
    def is_shared(self) -> bool:
        """Whether at least two islands have the same GPU."""
        return any(self.count_sharers(index) > 1 for index in self.by_island)

    def count_sharers(self, index: int) -> int:
        """Return the number of islands that have this island's first GPU; 0 if the island has
        none.
        """
        gpus = self.by_island[index]
        return self._count_islands()[gpus[0]] if gpus else 0

    def give_spare(self, index: int, island: IslandConfig) -> None:
        """Give a joining island one GPU per rank, if enough are left. An island that had GPUs keeps
        them.

        If none is left, the island shares the GPU with the fewest islands, if all of them, and
        itself, have one rank.
        """
        if index in self.by_island:
            return
        count = 0 if island.device == "cpu" or len(self.spare) < island.ranks else island.ranks
        self.by_island[index], self.spare = self.spare[:count], self.spare[count:]
        used = self._count_islands()
        if count == 0 and island.device != "cpu" and used and self._may_share(island):
            self.by_island[index] = (min(used, key=lambda gpu: used[gpu]),)

    def environment(self, index: int | str) -> dict[str, str]:
        """Return the environment in which an island's processes see only its GPUs, numbered from 0.
        Other processes see all.
        """
        if not isinstance(index, int) or index not in self.by_island:
            return {}
        shown = {VISIBLE: ",".join(self.by_island[index])}
        sharers = self.count_sharers(index)
        return shown | {SHARERS: str(sharers)} if sharers > 1 else shown

    def _count_islands(self) -> Counter[str]:
        """Return the number of islands that have each GPU, for GPUs that at least one island
        has.
        """
        return Counter(gpu for gpus in self.by_island.values() for gpu in gpus)

    def _may_share(self, island: IslandConfig) -> bool:
        are_single = all(len(gpus) <= 1 for gpus in self.by_island.values())
        return island.ranks == 1 and are_single and not island.auto


def share_gpus(islands: Sequence[IslandConfig], gpus: Sequence[str]) -> GpuShares:
    """Give a GPU to each rank of each island, in order; none to islands that compute on the CPU.

    If there are too few GPUs and each of these islands has one rank, several islands get the same
    GPU. Either all islands whose device is `auto` get GPUs, or all of them get the CPU. Raises
    ConfigError if the GPUs do not suffice for the islands whose device is `cuda`.
    """
    settings: tuple[tuple[DeviceSetting, ...], ...] = ("cuda", "auto"), ("cuda",)
    for on_gpu in settings:
        asking = [index for index, island in enumerate(islands) if island.device in on_gpu]
        if (shares := _give(islands, asking, gpus)) is not None:
            return shares
    raise ConfigError(
        f"island.device is 'cuda' for {count_ranks(islands, ('cuda',))} ranks of the islands "
        f"together, and torch finds {describe_gpus(len(gpus))} on this machine; start fewer "
        "islands (--islands) or ranks (--ranks), or set island.device to auto or cpu"
    )


def _give(
    islands: Sequence[IslandConfig], asking: Sequence[int], gpus: Sequence[str]
) -> GpuShares | None:
    """Give GPUs to the islands with indices `asking` and none to the others. Return None if that is
    not possible.
    """
    shares = GpuShares(dict.fromkeys(range(len(islands)), ()), tuple(gpus))
    if sum(islands[index].ranks for index in asking) <= len(gpus):
        for index in asking:
            count = islands[index].ranks
            shares.by_island[index], shares.spare = shares.spare[:count], shares.spare[count:]
        return shares
    if not gpus or any(islands[index].ranks > 1 for index in asking):
        return None
    shares.by_island |= {index: (gpus[place % len(gpus)],) for place, index in enumerate(asking)}
    shares.spare = ()
    return shares


def share_first_gpu(islands: Sequence[IslandConfig], gpus: Sequence[str]) -> GpuShares:
    """Return the shares of islands in one process, which all get the same device. Raises
    ConfigError as choose_device.
    """
    device = choose_device(islands[0].device, 0, 1, len(gpus))
    return GpuShares(dict.fromkeys(range(len(islands)), () if device == "cpu" else (gpus[0],)))


def check_shares(
    islands: Sequence[IslandConfig], shares: GpuShares, cards: Mapping[str, Card]
) -> None:
    """Raise ConfigError if an island cannot use its GPU. `cards`: the known GPUs, by the names in
    `shares`.
    """
    for index, island in enumerate(islands):
        for gpu in shares.by_island[index]:
            if gpu in cards:
                fit_compute_dtype(island, cards[gpu])
        if island.auto and (sharers := shares.count_sharers(index)) > 1:
            raise ConfigError(
                f"island.auto of {island.label!r} chooses by the memory and speed of a whole GPU, "
                f"and {sharers} islands share one on this machine; set island.micro_batch and "
                "island.parallel.recompute yourself and island.auto=[], or start fewer islands "
                "(--islands), or set island.device=cpu"
            )


def describe_shares(
    islands: Sequence[IslandConfig], shares: GpuShares, num_gpus: int, obstacle: str = ""
) -> Iterator[str]:
    """Yield a line if islands share GPUs, and a line if `auto` is the CPU although the machine has
    GPUs or a driver.

    `obstacle`: the result of find_obstacle if torch finds no GPU.
    """
    wanted = count_ranks(islands, ("auto", "cuda"))
    on_gpu = [index for index, gpus in shares.by_island.items() if gpus]
    if shares.is_shared:
        yield (
            f"{len(on_gpu)} islands of one rank share {num_gpus} "
            f"{'GPU' if num_gpus == 1 else 'GPUs'}: they slow each "
            "other down, and their memory adds up; with island.device=cpu they compute on the CPU"
        )
    if not any(
        island.device == "auto" and index not in on_gpu for index, island in enumerate(islands)
    ):
        return
    if num_gpus:
        yield (
            f"the islands have {wanted} ranks together and this machine {num_gpus} GPUs: islands "
            "whose island.device "
            "is auto compute on the CPU; with fewer --islands or --ranks they compute on the GPUs"
        )
    elif obstacle:
        yield (
            f"torch finds no GPU ({obstacle}): islands whose island.device is auto compute on "
            "the CPU"
        )


def count_ranks(islands: Sequence[IslandConfig], settings: Sequence[DeviceSetting]) -> int:
    """Return the number of ranks of the islands whose device is one of `settings`."""
    return sum(island.ranks for island in islands if island.device in settings)
