"""Initial weights: a function of (seed, parameter name) alone, so equal bits on every mesh and island.

torch's own initialisers are no use here: on a CPU mesh they give every shard the same numbers.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from inner.model import Transformer
from inner.params import LocalParams, ParamSpec

STD = 0.02
RESIDUAL_OUTPUTS = ("out_proj.weight", "down_proj.weight")


def initialise(params: LocalParams, parts: Sequence[Transformer], seed: int) -> None:
    """Fills every parameter and table of materialised parts of a model, sharded or not. No communication."""
    num_layers = parts[0].sizes.num_layers
    specs = {spec.name: spec for spec in params.specs}
    for index, held in enumerate(params.slices):
        full = initial_values(specs[held.name], seed, num_layers)
        params.write(index, full[slice(*held.rows), slice(*held.cols)])
    for part in parts:
        part.fill_tables()


def initial_values(spec: ParamSpec, seed: int, num_layers: int) -> Tensor:
    """The whole parameter as a matrix, fp32 on the CPU: it is drawn in full on every rank, then cut."""
    if spec.name.endswith("norm.weight"):
        return torch.ones(spec.matrix_shape)
    # Each layer adds two outputs to the residual stream; its variance shall not grow with depth.
    std = STD / math.sqrt(2 * num_layers) if spec.name.endswith(RESIDUAL_OUTPUTS) else STD
    digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(spec.matrix_shape).normal_(0.0, std, generator=generator)
