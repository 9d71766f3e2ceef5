"""Find the parameters of the user's model that islands average: those that are trained."""

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError
from inner.param_spec import ParamSpec
from inner.params import LocalParams


def trained_params(model: nn.Module) -> LocalParams:
    """Return a view of the parameters that require gradients, under their names in the innermost
    module.

    Wrappers of DDP, torch.compile and Fabric are removed. Raises ConfigError if islands cannot
    average the parameters.
    """
    inner = unwrap(model)
    trained = {name: param for name, param in inner.named_parameters() if param.requires_grad}
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient: there is nothing that islands could average")
    for name, param in trained.items():
        check_param(name, param)
    shapes = {name: tuple(param.shape) for name, param in trained.items()}
    return LocalParams.of_tensors(shapes, {name: [param] for name, param in trained.items()})


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, torch.compile and Fabric. Raises
    ConfigError for FSDP1.
    """
    while True:
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ConfigError(
                "the model is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters have lost names and "
                "shapes; shard it with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(forwarded := getattr(model, "_forward_module", None), nn.Module):
            model = forwarded  # Fabric's wrapper
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def check_param(name: str, param: Tensor) -> None:
    """Raise ConfigError if islands cannot average the parameter."""
    problem = ""
    cure = ""
    if param.is_meta:
        problem = "is on the meta device"
        cure = "give it values first (model.to_empty, then initialise or load)"
    elif param.dtype != torch.float32:
        problem = f"is {str(param.dtype).removeprefix('torch.')}"
        cure = "keep trained parameters in float32 and compute in bfloat16 by torch.autocast or FSDP's mixed precision"
    elif param.numel() == 0:
        problem = f"has the shape {tuple(param.shape)}"
        cure = "take it out of the model, or set requires_grad=False"
    elif isinstance(param, DTensor) and any(isinstance(place, Partial) for place in param.placements):
        problem = "is a DTensor of partial sums"
        cure = "redistribute it to Shard or Replicate"
    if problem:
        raise ConfigError(f"the parameter {name!r} {problem}, and islands cannot average it; {cure}")


def describe(specs: Sequence[ParamSpec]) -> str:
    """Return one line that differs between models whose trained parameters differ in names, shapes
    or order.
    """
    text = json.dumps([(spec.name, spec.shape) for spec in specs])
    elements = sum(spec.matrix_shape[0] * spec.matrix_shape[1] for spec in specs)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{len(specs)} parameters with {elements:,} elements, sha256 of names and shapes {digest}"
