"""The canonical view of a model's parameters: full names and shapes, and the rectangles that this rank holds.

The only file that unwraps DTensor. A parameter is seen as a matrix (shape[0], product of the rest); a 1-D
parameter is (n, 1). The union of the slices of one replica's ranks is the model exactly once.
"""

import math
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

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_parameters())
        self.specs = [ParamSpec(name, tuple(param.shape)) for name, param in named]
        self.slices = []
        # FSDP swaps the module's parameters while it computes; these stay the sharded fp32 masters.
        self._params: list[Tensor] = []
        for name, param in named:
            held = _slice(name, param)
            if min(held.shape) > 0:
                self.slices.append(held)
                self._params.append(param)

    def read(self, index: int) -> Tensor:
        """Slice `index` as a 2-D fp32 CPU tensor; a view of the live parameter where that is on the CPU."""
        return _local(self._params[index]).view(self.slices[index].shape).cpu()

    def write(self, index: int, values: Tensor) -> None:
        """Copies `values` (2-D, shape of the slice) into the live parameter, in place."""
        held = self.slices[index]
        assert values.shape == held.shape, f"{held.name}: got {tuple(values.shape)}, holds {held.shape}"
        _local(self._params[index]).view(held.shape).copy_(values)


def _local(param: Tensor) -> Tensor:
    """This rank's piece of a parameter, sharing its memory, without autograd."""
    param = param.detach()
    return param.to_local() if isinstance(param, DTensor) else param


def _slice(name: str, param: Tensor) -> ParamSlice:
    """Where this rank's piece lies; it may be empty when there are more ranks than rows."""
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
