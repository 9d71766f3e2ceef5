"""A rank's tensors in a checkpoint: parameters and optimizer states, under names that do not depend
on the mesh.

    params/<full name>                  fp32 master weights
    optimizer/<full name>/<state>       the optimizer's states of that parameter
    buffers/<full name>                 buffers that training changes: the biases of routers

Hyperparameters are not saved: they come from the config, and the learning rate from the config and
the inner step.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from inner.model.buffers import saved_buffers
from inner.optim.muon.muon import rows_of_stack
from inner.optim.primal_averaging import optimizer_kind

PARAMS = "params/"
OPTIMIZER = "optimizer/"
BUFFERS = "buffers/"

Stages = Sequence[nn.Module]
Optimizers = Sequence[Optimizer]
Saved = Mapping[str, TensorStorageMetadata]
"""Global shape and dtype of each saved tensor, by its name in the checkpoint."""


def live_tensors(stages: Stages, optimizers: Optimizers) -> dict[str, list[Tensor]]:
    """Return this rank's tensors by name, detached but sharing memory. A tied weight has several
    copies under one name.
    """
    named: dict[str, list[Tensor]] = defaultdict(list)
    for name, param in named_params(stages):
        named[PARAMS + name].append(param.detach())
    for buffer in saved_buffers(stages):
        named[BUFFERS + buffer.name].append(buffer.tensor)
    for name, param, optimizer, _ in _stepped(stages, optimizers):
        for key, value in optimizer.state.get(param, {}).items():
            assert isinstance(value, Tensor), (
                f"{name}: {key} is {type(value)}; only tensors are saved"
            )
            named[f"{OPTIMIZER}{name}/{key}"].append(value.detach())
    return dict(named)


def num_bytes(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, int]:
    """Return the size in bytes of each full tensor, of which this rank may hold only a shard."""
    return {name: copies[0].numel() * copies[0].element_size() for name, copies in tensors.items()}


def optimizer_names(stages: Stages, optimizers: Optimizers) -> dict[str, str]:
    """Return the class of the optimizer that steps each parameter, by parameter name."""
    return {
        name: optimizer_kind(optimizer) for name, _, optimizer, _ in _stepped(stages, optimizers)
    }


def make_states(stages: Stages, optimizers: Optimizers, saved: Saved) -> None:
    """Give every optimizer exactly the states that are saved, filled with zeros, so that they can
    be loaded into.

    An optimizer creates its states in its first step, but a step would change parameters (weight
    decay) and may be collective (Muon). The states are therefore created here as the optimizer
    would create them: in the shape of the parameter, as a whole vector with a number for each row
    (NorMuon), or 0-d.
    """
    keys = _saved_keys(saved)
    for name, param, optimizer, group in _stepped(stages, optimizers):
        # Existing states stay the same objects, because other code may hold references to them.
        states = optimizer.state.pop(param, {})
        for key in states.keys() - set(keys[name]):
            del states[key]
        for key in set(keys[name]) - states.keys():
            states[key] = _allocate(param, group, saved[f"{OPTIMIZER}{name}/{key}"])
        if states:
            optimizer.state[param] = states


def find_mismatch(
    stages: Stages, optimizers: Optimizers, saved: Saved, saved_kinds: Mapping[str, str]
) -> str | None:
    """Return a message about the first parameter that cannot be loaded from the checkpoint into
    these stages, or None.
    """
    for name, param in named_params(stages):
        stored = saved.get(PARAMS + name)
        if stored is None:
            return f"the model has the parameter {name}, the checkpoint does not"
        if stored.size != param.shape or stored.properties.dtype != param.dtype:
            return (
                f"{name} is {tuple(param.shape)} {param.dtype} in the model, {tuple(stored.size)} "
                f"{stored.properties.dtype} in the checkpoint"
            )
    for buffer in saved_buffers(stages):
        if BUFFERS + buffer.name not in saved:
            return f"the model has the buffer {buffer.name}, the checkpoint does not"
    keys = _saved_keys(saved)
    for name, param, _, _ in _stepped(stages, optimizers):
        for key in keys[name]:
            if (size := saved[f"{OPTIMIZER}{name}/{key}"].size) not in (
                _shape_of_rows(param),
                param.shape,
                (),
            ):
                return (
                    f"{name} is {tuple(param.shape)}, but its {key} in the checkpoint is "
                    f"{tuple(size)}"
                )
    for name, optimizer in optimizer_names(stages, optimizers).items():
        if saved_kinds.get(name) != optimizer:
            return (
                f"{name} is stepped by {optimizer} here, but by "
                f"{saved_kinds.get(name, 'none')} in the checkpoint"
            )
    return None


def saved_params(saved: Saved) -> set[str]:
    """Return the names of all parameters of the saved model."""
    return {name.removeprefix(PARAMS) for name in saved if name.startswith(PARAMS)}


def _saved_keys(saved: Saved) -> dict[str, list[str]]:
    """Return the names of each parameter's saved optimizer states."""
    keys: dict[str, list[str]] = defaultdict(list)
    for full in saved:
        if full.startswith(OPTIMIZER):
            name, _, key = full.removeprefix(OPTIMIZER).rpartition("/")
            keys[name].append(key)
    return keys


def named_params(stages: Stages) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this rank's parameters with their names. A tied weight occurs more than once."""
    for stage in stages:
        yield from stage.named_parameters()


def _shape_of_rows(param: Tensor) -> torch.Size:
    """Return the shape of a state with a number for each row: of a matrix, or of all matrices of a
    stack of experts.
    """
    return param.shape[:2] if param.ndim == 3 else param.shape[:1]


def _stepped(
    stages: Stages, optimizers: Optimizers
) -> Iterator[tuple[str, nn.Parameter, Optimizer, dict[str, Any]]]:
    """Yield (name, parameter, optimizer, param group) for each parameter that an optimizer
    steps.
    """
    names = {param: name for name, param in named_params(stages)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                assert param in names, (
                    f"{type(optimizer).__name__} steps a parameter that is in no stage"
                )
                yield names[param], param, optimizer, group


def _allocate(
    param: nn.Parameter, group: Mapping[str, Any], saved: TensorStorageMetadata
) -> Tensor:
    """Allocate one state. 0-d states (step counts) are on the CPU, unless the optimizer's kernel
    reads them on the device.
    """
    dtype = saved.properties.dtype
    if saved.size == param.shape:
        return torch.zeros_like(param, dtype=dtype)
    if saved.size == _shape_of_rows(param):
        if param.ndim == 3:
            return rows_of_stack(param, dtype)
        return torch.zeros(saved.size, dtype=dtype, device=param.device)
    on_device = group.get("fused") or group.get("capturable")
    return torch.zeros((), dtype=dtype, device=param.device if on_device else "cpu")
