"""The canonical view of a model's parameters: full names and shapes, and the rectangles that this rank holds.

The only file that unwraps DTensor. A parameter is seen as a matrix (shape[0], product of the rest); a 1-D
parameter is (n, 1). The union of the slices of one replica's ranks is the model exactly once.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model, fp32."""

    name: str
    shape: tuple[int, ...]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.shape[0], math.prod(self.shape[1:])


@dataclass(frozen=True)
class ParamSlice:
    """The half-open rectangle rows x cols of a parameter that this rank holds."""

    name: str
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]


class LocalParams:
    """Reads and writes this rank's slices in place. Build it once, before the first forward."""

    specs: list[ParamSpec]
    """The whole model in its own order, the same on every rank; tied weights once."""
    slices: list[ParamSlice]
    """What this rank holds, in the order of `specs`; a parameter of which it holds nothing is left out."""

    def __init__(self, whole: nn.Module, parts: Sequence[nn.Module]) -> None:
        """`whole`: the model in one piece, which may be on the meta device; `parts`: the stages this rank holds."""
        self.specs = [ParamSpec(name, tuple(param.shape)) for name, param in whole.named_parameters()]
        self.slices = []
        # FSDP swaps the module's parameters while it computes; these stay the sharded fp32 masters.
        self._copies: list[list[Tensor]] = []
        named: dict[str, list[Tensor]] = defaultdict(list)
        for part in parts:
            for name, param in part.named_parameters():
                named[name].append(param)
        for spec in self.specs:
            copies = named.get(spec.name)
            if copies and min((held := _slice(spec, copies[0])).shape) > 0:
                self.slices.append(held)
                self._copies.append(copies)

    def copies(self, index: int) -> Sequence[Tensor]:
        """The live parameters that slice `index` is of: several of a tied one."""
        return self._copies[index]

    def read(self, index: int) -> Tensor:
        """Slice `index` as a 2-D fp32 CPU tensor; a view of the live parameter where that is on the CPU."""
        return local_tensor(self._copies[index][0]).view(self.slices[index].shape).cpu()

    def write(self, index: int, values: Tensor) -> None:
        """Copies `values` (2-D, shape of the slice) into the live parameter, in place; into both, if it is tied."""
        held = self.slices[index]
        assert values.shape == held.shape, f"{held.name}: got {tuple(values.shape)}, holds {held.shape}"
        for param in self._copies[index]:
            local_tensor(param).view(held.shape).copy_(values)


def local_tensor(param: Tensor) -> Tensor:
    """This rank's piece of a parameter or gradient, sharing its memory, without autograd."""
    if not isinstance(param, DTensor):
        return param.detach()
    # Not detach() first: that goes through DTensor's dispatch, and this is called for each parameter in each step.
    with torch.no_grad():
        return param.to_local()


def _slice(spec: ParamSpec, param: Tensor) -> ParamSlice:
    """Where this rank's piece lies; it may be empty when there are more ranks than rows."""
    name = spec.name
    assert tuple(param.shape) == spec.shape, f"{name}: {tuple(param.shape)} in a part, {spec.shape} in the model"
    local_shape: tuple[int, ...] = tuple(param.shape)
    offset: tuple[int, ...] = (0,) * param.ndim
    if isinstance(param, DTensor):
        local_shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        assert local_shape == tuple(param.to_local().shape), f"{name}: {local_shape}, {param.placements}"
    rest = tuple(param.shape[1:])
    if param.ndim != 2:
        assert local_shape[1:] == rest, f"{name}: only matrices may be sharded past their first dim"
        cols = (0, math.prod(rest))
    else:
        cols = (offset[1], offset[1] + local_shape[1])
    assert param.dtype == torch.float32, f"{name}: master weights are fp32, got {param.dtype}"
    return ParamSlice(name, rows=(offset[0], offset[0] + local_shape[0]), cols=cols)
