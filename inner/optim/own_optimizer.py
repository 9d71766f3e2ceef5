"""An own inner optimizer, named by its import path, and the checks of it before a run starts.

`optimizer.name: my_package.optimizers:Lion` is a subclass of torch.optim.Optimizer. It is built as

    Lion(groups, lr=..., **optimizer.options)

where each group is {"params": [...], "lr_scale": float, "weight_decay": float}. Requirements:

- `group["lr"]` is set before each step; a step with 0 must not change parameters. Decay is
  `group["weight_decay"]`.
- Between steps it keeps only `state[param][key]`: tensors, 0-d or with the parameter's shape and
  sharding. These are saved, and moved to any other mesh. Groups are not saved: their values come
  from the config.
- Parameters and gradients are fp32; plain tensors on an island of one rank, else DTensors. An
  elementwise optimizer need not know the difference. An optimizer that is not elementwise (norms,
  matrix products) must give the same numbers on shards as on whole matrices, as
  inner/optim/muon/muon.py does, and declare this by the class attribute `handles_shards = True`.
  Without it, meshes that shard (dp_shard, cp, tp) are refused.
- step() is called on all ranks of the island together, without a closure, and not after a step that
  is skipped.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inner.config import OptimizerConfig
from inner.errors import InputError, summarise
from inner.import_path import call_text, is_import_path, load
from inner.mesh import Degrees

KEY = "optimizer.name"
ROWS = 8
COLS = 6
STEPS = 3
LR = 0.01
Group = dict[str, Any]


def build_own_optimizer(groups: list[Group], config: OptimizerConfig) -> Optimizer:
    """Build the optimizer that the config names by its import path. Raises InputError if that
    fails.
    """
    found = load(config.name, KEY)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise InputError(
            f"{KEY}: got {config.name!r}, which is not a subclass of torch.optim.Optimizer; name "
            "one"
        )
    try:
        return cast(Any, found)(groups, lr=config.lr, **config.options)
    except Exception as error:
        given = ", ".join(["groups", "lr", *config.options])
        raise InputError(
            f"{KEY}: {config.name} is {call_text(found)}, and called with {given} it raised "
            f"{summarise(error)}; see optimizer.options"
        ) from error


def check_own_optimizer(config: OptimizerConfig, degrees: Degrees) -> None:
    """Try an own optimizer on small tensors. Raises InputError if it cannot train on this mesh, see
    the module's docstring.
    """
    if not is_import_path(config.name):
        return
    optimizer, whole = _train(config, _tensors(0), LR)
    _check_state(optimizer, config.name)
    _, unmoved = _train(config, _tensors(0), 0.0)
    if not all(map(torch.equal, unmoved, _tensors(0))):
        raise InputError(
            f"{KEY}: {config.name} moves parameters when group['lr'] is 0; read group['lr'] in "
            "each step, because it follows optimizer.schedule"
        )
    shards = degrees.fsdp * degrees.tp
    if (
        shards > 1
        and not getattr(optimizer, "handles_shards", False)
        and not _is_elementwise(config, whole)
    ):
        raise InputError(
            f"{KEY}: {config.name} steps the shards of a matrix differently from the whole, and "
            f"this mesh ({degrees}) shards; make it compute on DTensors as if they were whole and "
            "set handles_shards = True in the class (see inner/optim/muon/muon.py), or use meshes "
            "of dp_replicate and pp alone"
        )


def measure_state_bytes(config: OptimizerConfig) -> int:
    """Return the bytes that an own optimizer keeps for each element of a matrix. Raises
    InputError.
    """
    optimizer, _ = _train(config, _tensors(0), LR)
    _check_state(optimizer, config.name)
    states = (
        state
        for param, kept in optimizer.state.items()
        if param.ndim == 2
        for state in kept.values()
    )
    return sum(state.element_size() for state in states if state.ndim == 2)


def _tensors(seed: int) -> list[Tensor]:
    """Return a matrix and a vector with values drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(ROWS, COLS, generator=generator), torch.randn(ROWS, generator=generator)]


def _train(
    config: OptimizerConfig,
    start: Sequence[Tensor],
    lr: float,
    rows: slice = slice(None),
    cols: slice = slice(None),
) -> tuple[Optimizer, list[Tensor]]:
    """Step a part of the tensors a few times; return the optimizer and the stepped tensors. Raises
    InputError.
    """

    def part(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[0][rows, cols].clone(), tensors[1][rows].clone()]

    params = [nn.Parameter(tensor) for tensor in part(start)]
    optimizer = build_own_optimizer(
        [{"params": params, "lr_scale": 1.0, "weight_decay": 0.0}], config
    )
    settings = [_settings_of(group) for group in optimizer.param_groups]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for param, grad in zip(params, part(_tensors(step + 1)), strict=True):
            param.grad = grad
        try:
            optimizer.step()
        except Exception as error:
            raise InputError(
                f"{KEY}: {config.name} failed in step(): {summarise(error)}"
            ) from error
    changed = {
        key
        for before, group in zip(settings, optimizer.param_groups, strict=True)
        for key, value in _settings_of(group).items()
        if key not in before or before[key] != value
    }
    if changed:
        raise InputError(
            f"{KEY}: {config.name} changes {sorted(changed)} of its groups in step(), but groups "
            "are not saved; keep values that a resumed run needs in state[param], as tensors"
        )
    return optimizer, [param.detach() for param in params]


def _settings_of(group: Group) -> Group:
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _check_state(optimizer: Optimizer, name: str) -> None:
    """Raise InputError if the state could not be saved or moved to another mesh."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param not in set(params) for param in optimizer.state):
        raise InputError(
            f"{KEY}: {name} keeps state under {list(optimizer.state)}; only state of parameters is "
            "saved"
        )
    for param in params:
        for key, value in optimizer.state[param].items():
            if not isinstance(value, Tensor) or value.shape not in (param.shape, ()):
                got = (
                    f"a tensor of {tuple(value.shape)}"
                    if isinstance(value, Tensor)
                    else type(value).__name__
                )
                raise InputError(
                    f"{KEY}: {name} keeps state[param][{key!r}] as {got} for a parameter of "
                    f"{tuple(param.shape)}; allowed: tensors of the parameter's shape, or of no "
                    "dimension as torch.zeros(())"
                )


def _is_elementwise(config: OptimizerConfig, whole: list[Tensor]) -> bool:
    """Return whether quarters of the tensors, stepped alone, get the same values as in the whole
    tensors.
    """
    for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
        for cols in (slice(0, COLS // 2), slice(COLS // 2, COLS)):
            _, (matrix, vector) = _train(config, _tensors(0), LR, rows, cols)
            if not torch.allclose(matrix, whole[0][rows, cols], rtol=1e-4, atol=1e-6):
                return False
            if not torch.allclose(vector, whole[1][rows], rtol=1e-4, atol=1e-6):
                return False
    return True
