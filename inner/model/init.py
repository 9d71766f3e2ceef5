"""Initial weights. They depend on (seed, parameter name) alone, so all meshes and islands get the same bits.

torch's own initialisers cannot be used: on a CPU mesh they give every shard the same numbers.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inner.model.transformer import Transformer
from inner.param_spec import ParamSpec
from inner.params import LocalParams

STD = 0.02
RESIDUAL_OUTPUTS = ("out_proj.weight", "down_proj.weight")


def initialise(params: LocalParams, stages: Sequence[Transformer], seed: int) -> None:
    """Fill every parameter and table of materialised stages, sharded or not. No communication."""
    num_layers = stages[0].sizes.num_layers
    specs = {spec.name: spec for spec in params.specs}
    for index, param_slice in enumerate(params.slices):
        values = initial_values(specs[param_slice.name], seed, num_layers)
        params.write(index, values[slice(*param_slice.rows), slice(*param_slice.cols)])
    for stage in stages:
        stage.fill_tables()


def initial_values(spec: ParamSpec, seed: int, num_layers: int) -> Tensor:
    """Initial value of a full parameter as a matrix, fp32 on the CPU. Every rank draws it in full, then slices it."""
    if spec.name.endswith("norm.weight"):
        return torch.ones(spec.matrix_shape)
    if spec.name.endswith(".bias"):
        return torch.zeros(spec.matrix_shape)
    # Each layer adds two outputs to the residual stream, whose variance must not grow with depth.
    std = STD / math.sqrt(2 * num_layers) if spec.name.endswith(RESIDUAL_OUTPUTS) else STD
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(spec.matrix_shape).normal_(0.0, std, generator=generator)
