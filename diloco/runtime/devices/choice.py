"""Choose the device and the dtype of each rank, from the config and the machine's GPUs.

Importing this does not import torch.
"""

from typing import Literal

from diloco.config.schema import IslandConfig
from diloco.errors import ConfigError
from diloco.runtime.devices.cuda_driver import Card
from diloco.runtime.devices.gpus import describe_gpus, list_cards, list_gpus

DeviceSetting = Literal["auto", "cpu", "cuda"]


def choose_device(
    setting: DeviceSetting, local_rank: int, num_local_ranks: int, num_gpus: int
) -> str:
    """Return `cpu` or `cuda:<local rank>`; the kind is the same for all ranks of a node.

    `auto` is CUDA if the node has a GPU for each of its ranks. Raises ConfigError for `cuda` if
    there are too few GPUs.
    """
    is_enough = num_gpus >= num_local_ranks
    if setting == "cpu" or (setting == "auto" and not is_enough):
        return "cpu"
    if not is_enough:
        raise ConfigError(
            f"island.device is 'cuda' with {num_local_ranks} ranks on this machine, and torch "
            f"finds {describe_gpus(num_gpus)}; each rank needs one: {_fewer_ranks(num_gpus)}set "
            "island.device to auto or cpu"
        )
    return f"cuda:{local_rank}"


def explain_cpu(setting: DeviceSetting, num_local_ranks: int, num_gpus: int) -> str | None:
    """Return why `auto` chose the CPU, in one line; None if the config names a device or there are
    enough GPUs.
    """
    if setting != "auto" or num_gpus >= num_local_ranks:
        return None
    if num_gpus == 0:
        return f"island.device is 'auto' and torch finds {describe_gpus(0)}: computing on the CPU"
    return (
        f"island.device is 'auto' and torch finds {num_gpus} GPUs for {num_local_ranks} ranks: "
        f"computing on the CPU; to use the GPUs, {_fewer_ranks(num_gpus)}give each rank one"
    )


def _fewer_ranks(num_gpus: int) -> str:
    return f"set island.ranks={num_gpus} or " if num_gpus else ""


def fit_compute_dtype(island: IslandConfig, card: Card) -> IslandConfig:
    """Return the island with a dtype that its GPU supports. Raises ConfigError if it asks for bf16
    and the GPU has none.
    """
    if card.has_bfloat16 or island.compute_dtype in ("float16", "float32"):
        return island
    if island.compute_dtype == "bfloat16":
        raise ConfigError(
            f"island.compute_dtype of {island.label!r} is 'bfloat16', and its GPU ({card.name}, "
            f"compute capability {card.capability[0]}.{card.capability[1]}) has no bf16, which "
            "needs 8.0; set it to float16, float32 or auto"
        )
    return island.model_copy(update={"compute_dtype": "float32"})


def check_device(island: IslandConfig) -> None:
    """Raise ConfigError if the island's ranks, all on this machine, cannot compute as its config
    requires.
    """
    if island.device == "cpu" or (island.device == "auto" and island.compute_dtype != "bfloat16"):
        return
    if choose_device(island.device, 0, island.ranks, len(list_gpus())) != "cpu":
        for card in list_cards()[: island.ranks]:
            fit_compute_dtype(island, card)
