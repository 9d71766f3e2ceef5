"""The mesh of an island's ranks, and how a step's tokens are spread over it. torch is imported when
a mesh is built.

Axes are ordered from the slowest link to the fastest: ranks along `tp` communicate most and are
adjacent. The last column is what is sent:

    pp            each rank holds some of the layers         activations, point to point
    dp_replicate  each rank holds the same shards            gradients, once per step
    dp_shard      each rank holds a shard of every weight    weights and gradients
    cp            each rank holds a share of the sequence    keys and values; shards weights
                  together with dp_shard
    tp            each rank holds a share of every matrix    activations, four times per layer

Experts are spread over the same ranks in another way. The ranks of dp_shard x cp x tp are also
edp x ep, with ep adjacent:

    edp           each rank holds a shard of every expert    weights and gradients of experts
    ep            each rank holds some of the experts        rows of tokens, to the experts and back
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from inner.config import MeshConfig
from inner.errors import InputError, nearest_multiples

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SPARSE_AXES = ("pp", "dp_replicate", "edp", "ep")
"""The axes of the same ranks as experts are spread over them."""


@dataclass(frozen=True)
class Degrees:
    """Number of ranks along each axis, in the order of AXES."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Number of ranks among which the experts of a layer are divided. It is no factor of the number
    of ranks: see `edp`."""

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def num_ranks(self) -> int:
        return prod(self.sizes)

    @property
    def num_data_ranks(self) -> int:
        """Number of groups of ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks over which FSDP shards a weight."""
        return self.dp_shard * self.cp

    @property
    def edp(self) -> int:
        """Number of ranks over which FSDP shards an expert."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def has_sparse_mesh(self) -> bool:
        """Whether experts are spread over the ranks in another way than other weights."""
        return self.ep > 1 or self.tp > 1

    @property
    def num_copies(self) -> int:
        """Number of ranks that compute with the same weights on different tokens."""
        return self.dp_replicate * self.fsdp

    @property
    def has_two_axes_of_replicas(self) -> bool:
        """Whether ranks along dp_replicate and ranks along cp may both hold the same whole
        weights.
        """
        return self.dp_shard == 1 and self.dp_replicate > 1 and self.cp > 1

    @property
    def needs_group_of_copies(self) -> bool:
        """Whether the ranks with the same whole weights lie along two axes and are not all
        ranks.
        """
        return self.has_two_axes_of_replicas and self.num_copies < self.num_ranks

    def coordinates(self, rank: int, axes: tuple[str, ...] = AXES) -> dict[str, int]:
        """Return the rank's coordinate on each of `axes`, which are AXES or SPARSE_AXES."""
        place = {}
        for axis in reversed(axes):
            rank, place[axis] = divmod(rank, getattr(self, axis))
        return {axis: place[axis] for axis in axes}

    def __str__(self) -> str:
        degrees = zip((*AXES, "ep"), (*self.sizes, self.ep), strict=True)
        named = [f"{axis}{degree}" for axis, degree in degrees if degree > 1]
        return " x ".join(named) or "one process"


def resolve_degrees(config: MeshConfig, num_ranks: int) -> Degrees:
    """Compute the degrees for `num_ranks` ranks. Raises InputError if their product cannot be
    `num_ranks`.

    pp  dp_replicate  dp_shard  cp  tp  num_ranks  ->
     1             1        -1   1   1          4  dp_shard 4
     2             1        -1   1   2          8  dp_shard 2
     1             2         2   1   1          3  error
    """
    others = {axis: getattr(config, axis) for axis in AXES if axis != "dp_shard"}
    product = prod(others.values())
    if num_ranks % product:
        raise InputError(
            f"island.mesh: {_product(others)} does not divide the island's {num_ranks} ranks; "
            f"{_cure(others, num_ranks)}"
        )
    shard = num_ranks // product if config.dp_shard == -1 else config.dp_shard
    if shard * product != num_ranks:
        raise InputError(
            f"island.mesh: {_product(others | {'dp_shard': shard})}, but the island has "
            f"{num_ranks} ranks; set dp_shard to {num_ranks // product} or -1, or island.ranks to "
            f"{shard * product}"
        )
    degrees = Degrees(**others, dp_shard=shard, ep=config.ep)
    check_ep(degrees)
    return degrees


def check_ep(degrees: Degrees) -> None:
    """Raise InputError unless ep is 1 or a multiple of tp, and divides the ranks of dp_shard x cp x
    tp.
    """
    ranks = degrees.fsdp * degrees.tp
    allowed = [
        ep for ep in range(1, ranks + 1) if ranks % ep == 0 and (ep == 1 or ep % degrees.tp == 0)
    ]
    if degrees.ep not in allowed:
        raise InputError(
            f"island.mesh.ep ({degrees.ep}) must divide dp_shard x cp x tp ({ranks}), and be 1 or "
            f"a multiple of tp ({degrees.tp}); set it to {' or '.join(map(str, allowed))}"
        )


def _product(degrees: dict[str, int]) -> str:
    """Return the degrees above 1 as text, with their product if they are several."""
    above_one = {axis: degree for axis, degree in degrees.items() if degree > 1}
    factors = " x ".join(f"{axis} {degree}" for axis, degree in above_one.items())
    if len(above_one) < 2:
        return factors or "dp_shard 1"
    return f"{factors} = {prod(above_one.values())}"


def _cure(others: dict[str, int], num_ranks: int) -> str:
    """Return a text with the degrees of one axis that would divide the ranks, or numbers of ranks
    that would work.
    """
    product = prod(others.values())
    for axis, degree in others.items():
        allowed = [n for n in range(1, num_ranks + 1) if num_ranks % (product // degree * n) == 0]
        if degree > 1 and allowed:
            return (
                f"{axis} can be {' or '.join(map(str, allowed))}, or set island.ranks to a "
                f"multiple of {product}"
            )
    return f"set island.ranks to a multiple of {product}"


class IslandMesh:
    """The island's ranks as DeviceMeshes, with this rank's coordinates. Every rank must build it at
    the same time.
    """

    def __init__(self, degrees: Degrees, device_type: str) -> None:
        # Imported here so that the launcher can check degrees without importing torch.
        from torch.distributed.device_mesh import init_device_mesh

        self.degrees = degrees
        sizes = degrees.pp, degrees.dp_replicate, degrees.fsdp, degrees.tp
        self.world = init_device_mesh(
            device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
        )
        """The whole mesh. Its axis fsdp is dp_shard and cp together, because weights are sharded
        over both."""
        if degrees.cp > 1:
            self._split = init_device_mesh(device_type, degrees.sizes, mesh_dim_names=AXES)
        if degrees.needs_group_of_copies:
            sizes = degrees.pp, degrees.num_copies, degrees.tp
            self._copies = init_device_mesh(
                device_type, sizes, mesh_dim_names=("pp", "copies", "tp")
            )
        self.at = degrees.coordinates(self.world.get_rank())
        """This rank's coordinate on each axis."""

    @property
    def fsdp(self) -> "DeviceMesh":
        """The mesh that FSDP replicates and shards over. An axis of a single replica is left out,
        because FSDP would still all-reduce over it.
        """
        return (
            self.world["fsdp"]
            if self.degrees.dp_replicate == 1
            else self.world["dp_replicate", "fsdp"]
        )

    @property
    def _axes_of_copies(self) -> list[str]:
        """The axes of `world` along which ranks compute with the same weights."""
        degrees = {"dp_replicate": self.degrees.dp_replicate, "fsdp": self.degrees.fsdp}
        return [axis for axis, degree in degrees.items() if degree > 1]

    @property
    def copies(self) -> "DeviceMesh":
        """The mesh of parameters that each rank holds whole. Its last axis is tp, if tp cuts
        them.
        """
        return self.world[tuple(self._axes_of_copies + ["tp"] * (self.degrees.tp > 1))]

    @property
    def copies_group(self) -> "ProcessGroup":
        """The ranks that compute with the same weights. Available only if dp_shard is 1, and other
        ranks have the same weights.
        """
        axes = self._axes_of_copies
        if len(axes) == 1:
            return self.world[axes[0]].get_group()
        return (
            self._copies["copies"].get_group()
            if self.degrees.needs_group_of_copies
            else _all_ranks()
        )

    @cached_property
    def sparse(self) -> "DeviceMesh":
        """The same ranks as (pp, dp_replicate, edp, ep). Every rank must ask for it first at the
        same time, because that creates groups.
        """
        from torch.distributed.device_mesh import init_device_mesh

        degrees = self.degrees
        sizes = degrees.pp, degrees.dp_replicate, degrees.edp, degrees.ep
        device_type = self.world.device_type
        return init_device_mesh(device_type, sizes, mesh_dim_names=SPARSE_AXES)

    @property
    def edp(self) -> "DeviceMesh":
        """The mesh that FSDP replicates and shards experts over; like `fsdp`."""
        return (
            self.sparse["edp"]
            if self.degrees.dp_replicate == 1
            else self.sparse["dp_replicate", "edp"]
        )

    @property
    def tp(self) -> "DeviceMesh":
        return self.world["tp"]

    @property
    def pp_group(self) -> "ProcessGroup":
        return self.world["pp"].get_group()

    @property
    def cp_group(self) -> "ProcessGroup":
        """The ranks that share a sequence. Available only if cp > 1."""
        return self._split["cp"].get_group()

    @property
    def data_rank(self) -> int:
        """Index of the share of sequences that this rank reads. Ranks along pp, cp and tp read the
        same share.
        """
        return self.at["dp_replicate"] * self.degrees.dp_shard + self.at["dp_shard"]


def _all_ranks() -> "ProcessGroup":
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None, "a mesh is built of an open process group"
    return group


def accumulation_steps(
    tokens_per_step: int, seq_len: int, micro_batch: int, num_data_ranks: int
) -> int:
    """Return the number of micro-batches per rank and inner step. Raises InputError if the tokens
    do not divide evenly.
    """
    step_tokens = seq_len * micro_batch * num_data_ranks
    if tokens_per_step % step_tokens:
        raise InputError(
            f"optimizer.tokens_per_step ({tokens_per_step}) must be a multiple of data.seq_len "
            f"({seq_len}) x island.micro_batch ({micro_batch}) x data ranks ({num_data_ranks}) = "
            f"{step_tokens}; try {nearest_multiples(tokens_per_step, step_tokens)}"
        )
    return tokens_per_step // step_tokens
