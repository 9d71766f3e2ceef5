"""Which parameters of somebody's model travel between islands: those that are trained, and whether they still are."""

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError
from inner.optim.moments import ParamsAndMoments
from inner.param_spec import ParamSpec
from inner.params import LocalParams
from outer.space.ranks import RankGroup

SAMPLED = 64
"""Values at either end of a parameter that are compared between the ranks of an island."""
NAMED = 4
"""Changed parameters that an error names; it counts the others."""
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def trained_params(model: nn.Module) -> LocalParams:
    """A view of the parameters that require gradients, under their names in the innermost module.

    DDP, torch.compile and Fabric are looked through. Raises ConfigError if islands cannot average them.
    """
    inner = unwrap(model)
    trained = {name: param for name, param in inner.named_parameters() if param.requires_grad}
    if not trained:
        raise ConfigError("no parameter of the model requires a gradient: there is nothing that islands could average")
    for name, param in trained.items():
        check_param(name, param)
    return LocalParams(inner, [inner], trained.keys())


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, torch.compile and Fabric. Raises ConfigError for FSDP1."""
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
    problem, cure = "", ""
    if param.is_meta:
        problem, cure = "is on the meta device", "give it values first (model.to_empty, then initialise or load)"
    elif param.dtype != torch.float32:
        problem = f"is {str(param.dtype).removeprefix('torch.')}"
        cure = "keep trained parameters in float32 and compute in bfloat16 by torch.autocast or FSDP's mixed precision"
    elif param.numel() == 0:
        problem, cure = f"has the shape {tuple(param.shape)}", "take it out of the model, or set requires_grad=False"
    elif isinstance(param, DTensor) and any(isinstance(place, Partial) for place in param.placements):
        problem, cure = "is a DTensor of partial sums", "redistribute it to Shard or Replicate"
    elif isinstance(param, DTensor) and param.ndim != 2 and any(is_shard_past_rows(p) for p in param.placements):
        problem, cure = "is sharded past its first dimension", "shard parameters that are no matrices by dimension 0"
    if problem:
        raise ConfigError(f"the parameter {name!r} {problem}, and islands cannot average it; {cure}")


def is_shard_past_rows(placement: object) -> bool:
    return isinstance(placement, Shard) and placement.dim != 0


def describe(specs: Sequence[ParamSpec]) -> str:
    """One line that differs between models whose trained parameters differ in names, shapes or order."""
    text = json.dumps([(spec.name, spec.shape) for spec in specs])
    elements = sum(spec.matrix_shape[0] * spec.matrix_shape[1] for spec in specs)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{len(specs)} parameters with {elements:,} elements, sha256 of names and shapes {digest}"


def sample(params: LocalParams) -> str:
    """A hash of some values of each parameter of which this rank holds a whole copy, the same on ranks with copies."""
    hashed = hashlib.sha256()
    for index in range(len(params.slices)):
        if not isinstance(params.copies(index)[0], DTensor):
            values = params.read(index).flatten()
            hashed.update(torch.cat((values[:SAMPLED], values[-SAMPLED:])).numpy().tobytes())
    return f"a sample of values, sha256 {hashed.hexdigest()[:16]}"


class ParamsWatch:
    """Compares the parameters of a model with those that it has now. Islands would not see others."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained = {name: param for name, param in params_of(model).items() if param.requires_grad}
        self._kinds = {name: kind(param) for name, param in self._trained.items()}

    def require_same(self, ranks: RankGroup, number: int) -> None:
        """Raise ConfigError on every rank if one of them has other parameters than it had, in round `number`."""
        for rank, changes in enumerate(ranks.gather(self.changes())):
            if changes:
                more = f"; and {len(changes) - NAMED} more" if len(changes) > NAMED else ""
                where = f" on rank {rank}" if ranks.num_ranks > 1 else ""
                raise ConfigError(
                    f"round {number}: the model's parameters have changed since Islands was made{where}: "
                    f"{'; '.join(changes[:NAMED])}{more}. Islands averages those that required gradients then, and "
                    "this island would drift apart from the others. Make Islands after the change, the same on every "
                    "island: what is trained later requires gradients from the start and joins the optimizer later, "
                    "and new values are copied into a parameter (copy_, load_state_dict without assign=True)"
                )

    def changes(self) -> list[str]:
        """One phrase for each parameter that differs. One that was frozen since is still averaged, and none of them."""
        now = params_of(self._model)
        changes = []
        for name, param in now.items():
            if name not in self._trained:
                if param.requires_grad:
                    changes.append(f"{name!r} requires a gradient, and did not or was not there")
            elif param is not self._trained[name]:
                changes.append(f"{name!r} is another tensor")
            elif kind(param) != self._kinds[name]:
                changes.append(f"{name!r} was {self._kinds[name]} and is {kind(param)}")
        changes += [f"{name!r} is no longer there" for name in self._trained if name not in now]
        return changes


def params_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by their names in the innermost module; those of FSDP2 are the shards."""
    inner = unwrap(model)
    for module in inner.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # After an evaluation the module may still hold what it has gathered.
    return dict(inner.named_parameters())


def kind(param: Tensor) -> str:
    """Shape and dtype in words, which may change in place."""
    dtype = str(param.dtype).removeprefix("torch.")
    return f"{dtype} {list(param.shape)}"


def with_moments(params: LocalParams, optimizers: Optimizers) -> ParamsAndMoments:
    """The parameters with AdamW's moments, for `outer.moments`. Raises ConfigError for other or used optimizers."""
    found = as_list(optimizers)
    if not found or any(type(optimizer) is not torch.optim.AdamW for optimizer in found):
        got = ", ".join(type(optimizer).__name__ for optimizer in found) or "none"
        raise ConfigError(f"outer.moments averages the moments of torch.optim.AdamW; got the optimizers: {got}")
    if any(optimizer.state for optimizer in found):
        raise ConfigError("outer.moments: make Islands before the optimizer's first step, and load its state after")
    held = {param for optimizer in found for group in optimizer.param_groups for param in group["params"]}
    trained = [param for index in range(len(params.slices)) for param in params.copies(index)]
    if any(param not in held for param in trained):
        raise ConfigError("outer.moments: the optimizers do not hold all parameters that require gradients")
    return ParamsAndMoments(params, found)


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """The optimizers themselves, without the wrappers that accelerate and Fabric put around them."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers or []
    return [innermost(optimizer) for optimizer in given]


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(inside := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inside
    return optimizer
