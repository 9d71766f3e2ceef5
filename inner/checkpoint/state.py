"""What a checkpoint holds of a rank: parameters and optimizer states by names that do not depend on the mesh.

    params/<full name>                  fp32 master weights
    optimizer/<full name>/<state>       what the optimizer remembers of that parameter

Hyperparameters are not state: they come from the config, the learning rate from it and the inner step.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from inner.primal_averaging import kind

PARAMS = "params/"
OPTIMIZER = "optimizer/"

Parts = Sequence[nn.Module]
Optimizers = Sequence[torch.optim.Optimizer]
Saved = Mapping[str, TensorStorageMetadata]
"""Global shape and dtype of each saved tensor, by its name in the checkpoint."""


def live_tensors(parts: Parts, optimizers: Optimizers) -> dict[str, list[Tensor]]:
    """This rank's tensors without autograd, sharing memory; several under one name are a tied weight's copies."""
    named: dict[str, list[Tensor]] = defaultdict(list)
    for name, param in _params(parts):
        named[PARAMS + name].append(param.detach())
    for name, param, optimizer, _ in _stepped(parts, optimizers):
        for key, value in optimizer.state.get(param, {}).items():
            assert isinstance(value, Tensor), f"{name}: {key} is {type(value)}; only tensors are saved"
            named[f"{OPTIMIZER}{name}/{key}"].append(value.detach())
    return dict(named)


def copy_to_cpu(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """A copy of one tensor of each name; DTensors stay DTensors, their shards on the CPU."""
    return {name: copies[0].to("cpu", copy=True) for name, copies in tensors.items()}


def num_bytes(tensors: Mapping[str, Tensor | Sequence[Tensor]]) -> dict[str, int]:
    """Bytes of each whole tensor, of which this rank may hold a shard."""
    firsts = {name: value if isinstance(value, Tensor) else value[0] for name, value in tensors.items()}
    return {name: first.numel() * first.element_size() for name, first in firsts.items()}


def optimizer_names(parts: Parts, optimizers: Optimizers) -> dict[str, str]:
    """The kind of the optimizer that steps each parameter."""
    return {name: kind(optimizer) for name, _, optimizer, _ in _stepped(parts, optimizers)}


def make_states(parts: Parts, optimizers: Optimizers, saved: Saved) -> None:
    """Gives every optimizer the states that are saved and no others, with zeros to be loaded into.

    An optimizer makes its states in its first step, which would change parameters (weight decay) and may be collective
    (Muon); so they are made here, as the optimizer would: like the parameter, or 0-d.
    """
    keys: dict[str, list[str]] = defaultdict(list)
    for full in saved:
        if full.startswith(OPTIMIZER):
            name, key = full.removeprefix(OPTIMIZER).rsplit("/", 1)
            keys[name].append(key)
    for name, param, optimizer, group in _stepped(parts, optimizers):
        # Those that are there stay what they are: others may hold them, too.
        held = optimizer.state.pop(param, {})
        for key in held.keys() - set(keys[name]):
            del held[key]
        for key in set(keys[name]) - held.keys():
            held[key] = _zeros(param, group, saved[f"{OPTIMIZER}{name}/{key}"])
        if held:
            optimizer.state[param] = held


def find_mismatch(
    parts: Parts, optimizers: Optimizers, saved: Saved, saved_optimizers: Mapping[str, str]
) -> str | None:
    """Why the checkpoint cannot be loaded into this rank's parts, naming the first parameter that does not fit."""
    for name, param in _params(parts):
        held = saved.get(PARAMS + name)
        if held is None:
            return f"the model has the parameter {name}, the checkpoint has not"
        if held.size != param.shape or held.properties.dtype != param.dtype:
            return (
                f"{name} is {tuple(param.shape)} {param.dtype} in the model, {tuple(held.size)} "
                f"{held.properties.dtype} in the checkpoint"
            )
    for name, optimizer in optimizer_names(parts, optimizers).items():
        if saved_optimizers.get(name) != optimizer:
            return f"{name} is stepped by {optimizer} here, by {saved_optimizers.get(name, 'none')} in the checkpoint"
    return None


def saved_params(saved: Saved) -> set[str]:
    """The names of all parameters of the saved model."""
    return {name.removeprefix(PARAMS) for name in saved if name.startswith(PARAMS)}


def param_names(parts: Parts) -> set[str]:
    """The names of this rank's parameters."""
    return {name for name, _ in _params(parts)}


def _params(parts: Parts) -> Iterator[tuple[str, nn.Parameter]]:
    for part in parts:
        yield from part.named_parameters()


def _stepped(
    parts: Parts, optimizers: Optimizers
) -> Iterator[tuple[str, nn.Parameter, torch.optim.Optimizer, dict[str, Any]]]:
    """(name, parameter, its optimizer, its group) of each parameter that an optimizer steps."""
    names = {param: name for name, param in _params(parts)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                assert param in names, f"{type(optimizer).__name__} steps a parameter that is in no part"
                yield names[param], param, optimizer, group


def _zeros(param: nn.Parameter, group: Mapping[str, Any], saved: TensorStorageMetadata) -> Tensor:
    """Room for one state; 0-d ones (step counts) lie on the CPU unless the optimizer's kernel reads them."""
    dtype = saved.properties.dtype
    if saved.size == param.shape:
        return torch.zeros_like(param, dtype=dtype)
    assert len(saved.size) == 0, f"a state of shape {tuple(saved.size)} for a parameter of {tuple(param.shape)}"
    on_device = group.get("fused") or group.get("capturable")
    return torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
