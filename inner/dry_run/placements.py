"""Find where every parameter lies on a mesh by building the model without memory, values or other
ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from inner.config import ParallelConfig
from inner.expert_names import is_stacked
from inner.mesh import Degrees, IslandMesh
from inner.model.sizes import ModelSizes, OwnModel
from inner.model.transformer import Transformer
from inner.parallel.build import Layout, build_stage, build_stages
from inner.params import local_tensor

FSDP_AXIS = "fsdp"
"""The axis of IslandMesh that is dp_shard and cp together."""


@dataclass(frozen=True)
class PlacedParam:
    """A parameter on the first rank of a pp coordinate. If ranks have unequal shares, the first
    rank has the largest.
    """

    name: str
    shape: tuple[int, ...]
    pp: int
    """The pp coordinate of the ranks that hold the parameter."""
    cuts: tuple[tuple[str, str], ...]
    """(axis, `rows`, `columns`, `experts` or `whole`) for each of dp_replicate, fsdp and tp that
    has more than one rank, and for edp and ep if experts are spread over them; `-` for an axis that
    the parameter is not spread over.
    """
    local_shape: tuple[int, ...]
    dtype: str
    num_bytes: int


def find_placements(
    model: ModelSizes | OwnModel, degrees: Degrees, parallel: ParallelConfig, seq_len: int
) -> list[PlacedParam]:
    """Return all parameters by pp coordinate, in the order of the model. A tied table occurs in the
    first and the last stage.

    Call it while no process group is open. Raises InputError if the mesh does not fit the model.
    """
    with _rank_zero(degrees.num_ranks):
        mesh = IslandMesh(degrees, "cpu")
        nowhere = torch.device("meta")
        # The compute dtype does not matter here, because parameters are stored in fp32.
        layout = Layout(model, seq_len, mesh, parallel, torch.bfloat16, nowhere)
        placed = [
            _place(name, param, degrees, pp, has_sparse_mesh=layout.has_sparse_mesh)
            for pp, stage in _all_stages(layout)
            for name, param in stage.named_parameters()
        ]
    return sorted(placed, key=lambda each: each.pp)


def _all_stages(layout: Layout) -> list[tuple[int, Transformer]]:
    """Build all stages and return each with its pp coordinate. They differ only in their layers, so
    one rank can build all.
    """
    if isinstance(layout.model, OwnModel):
        return [(0, stage) for stage in build_stages(layout)]
    return [
        (pp, build_stage(layout, stage))
        for pp, stage in zip(layout.stage_ranks, layout.stages, strict=True)
    ]


def _place(
    name: str, param: Tensor, degrees: Degrees, pp: int, *, has_sparse_mesh: bool
) -> PlacedParam:
    is_expert = is_stacked(name, param.ndim)
    own = (
        ("dp_replicate", "edp", "ep")
        if has_sparse_mesh and is_expert
        else ("dp_replicate", FSDP_AXIS, "tp")
    )
    axes = ("dp_replicate", FSDP_AXIS, "tp", "edp", "ep") if has_sparse_mesh else own
    cuts = {axis: "whole" if axis in own else "-" for axis in axes if getattr(degrees, axis) > 1}
    if isinstance(param, DTensor):
        names = param.device_mesh.mesh_dim_names or ()
        dims = ("experts", "rows", "columns") if is_expert else ("rows", "columns")
        cuts |= {
            axis: _cut(each, dims)
            for axis, each in zip(names, param.placements, strict=True)
            if axis in cuts
        }
    local = local_tensor(param)
    return PlacedParam(
        name=name,
        shape=tuple(param.shape),
        pp=pp,
        cuts=tuple(cuts.items()),
        local_shape=tuple(local.shape),
        dtype=str(local.dtype).removeprefix("torch."),
        num_bytes=local.numel() * local.element_size(),
    )


def _cut(placement: Placement, dims: tuple[str, ...]) -> str:
    """Return the direction in which a placement cuts a parameter with dimensions of these names.

    FSDP's shard of rows that tp has cut is a strided placement and not a Shard, but it also has a
    `dim`.
    """
    dim = getattr(placement, "dim", None)
    return "whole" if dim is None else dims[dim]


@contextmanager
def _rank_zero(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of `num_ranks` inside the block. The other ranks do not exist, and
    collectives do nothing.
    """
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
