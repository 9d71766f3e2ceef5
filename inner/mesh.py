"""How an island's ranks are laid out, and how a step's tokens are spread over them."""

from typing import TYPE_CHECKING

from inner.config import MeshConfig
from inner.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp_replicate", "dp_shard")


def resolve_degrees(config: MeshConfig, num_ranks: int) -> tuple[int, int]:
    """Degrees (dp_replicate, dp_shard) whose product is `num_ranks`. Raises InputError with a cure.

    dp_replicate  dp_shard  num_ranks  ->
               1        -1          4  (1, 4)
               2        -1          4  (2, 2)
               2         2          3  error
    """
    replicate, shard = config.dp_replicate, config.dp_shard
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    choices = " or ".join(f"{n} x {num_ranks // n}" for n in divisors)
    if num_ranks % replicate:
        raise InputError(
            f"island.mesh.dp_replicate ({replicate}) does not divide the island's {num_ranks} ranks; "
            f"dp_replicate x dp_shard can be {choices}"
        )
    if shard == -1:
        return replicate, num_ranks // replicate
    if replicate * shard != num_ranks:
        raise InputError(
            f"island.mesh.dp_replicate {replicate} x dp_shard {shard} = {replicate * shard}, but the island "
            f"has {num_ranks} ranks; set dp_shard to {num_ranks // replicate} or -1, "
            f"or start {replicate * shard} ranks"
        )
    return replicate, shard


def build_mesh(degrees: tuple[int, int], device_type: str) -> "DeviceMesh":
    """The island's 2-D mesh. Every rank must call it, after init_process_group."""
    # Imported here so that the launcher can check degrees without paying for torch.
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, degrees, mesh_dim_names=AXES)


def accumulation(tokens_per_step: int, seq_len: int, micro_batch: int, num_data_ranks: int) -> int:
    """Micro-batches of one rank in one inner step. Raises InputError if the tokens do not divide."""
    together = seq_len * micro_batch * num_data_ranks
    if tokens_per_step % together:
        below = tokens_per_step // together * together
        cure = f"{below} or {below + together}" if below else f"{together}"
        raise InputError(
            f"optimizer.tokens_per_step ({tokens_per_step}) must be a multiple of data.seq_len ({seq_len}) x "
            f"island.micro_batch ({micro_batch}) x data ranks ({num_data_ranks}) = {together}; try {cure}"
        )
    return tokens_per_step // together
