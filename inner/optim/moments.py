"""AdamW's moments beside the parameters, for who averages them between islands (DES-LOC, 2505.22549; Local Adam).

A moment is called like its parameter, with `@exp_avg` or `@exp_avg_sq` behind, and is cut as it is on every mesh.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inner.params import LocalParams, ParamSlice, ParamSpec, local_tensor

KINDS = ("exp_avg", "exp_avg_sq")
STEP = "step"
State = dict[str, Tensor]


class ParamsAndMoments:
    """Reads and writes this rank's slices of both in place, as LocalParams does of params.

    To be built before the first step: it makes the moments, which AdamW does in its first step only, as zeros.
    """

    specs: list[ParamSpec]
    """The model's parameters; each has two moments."""
    slices: list[ParamSlice]
    """Those of the params, of first moments, of second moments."""

    def __init__(self, params: LocalParams, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Every optimizer is an AdamW, and nothing else."""
        self._params = params
        self.specs = params.specs
        self.slices = list(params.slices)
        self._moments: list[list[Tensor]] = []
        states = make_states(optimizers)
        self._states: dict[str, list[State]] = {}
        for kind in KINDS:
            for index, held in enumerate(params.slices):
                self._states[held.name] = [states[param] for param in params.copies(index)]
                self.slices.append(replace(held, name=f"{held.name}@{kind}"))
                self._moments.append([state[kind] for state in self._states[held.name]])

    def read(self, index: int) -> Tensor:
        """Slice `index` as a 2-D fp32 CPU tensor; a view of the live one where that is on the CPU."""
        number = index - len(self._params.slices)
        if number < 0:
            return self._params.read(index)
        return local_tensor(self._moments[number][0]).view(self.slices[index].shape).cpu()

    def write(self, index: int, values: Tensor) -> None:
        """Copies `values` (2-D, shape of the slice) into the live param or moment, in place; into all if tied."""
        number = index - len(self._params.slices)
        if number < 0:
            self._params.write(index, values)
            return
        held = self.slices[index]
        assert values.shape == held.shape, f"{held.name}: got {tuple(values.shape)}, holds {held.shape}"
        for moment in self._moments[number]:
            local_tensor(moment).view(held.shape).copy_(values)

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Bias correction goes on as if the moments of each parameter named came from so many inner steps; any rank's.

        0: from none. AdamW would divide a first moment that came from elsewhere by next to nothing, so both become
        zero.
        """
        for name, count in steps.items():
            for state in self._states.get(name, []):
                state[STEP].fill_(count)
                if count == 0:
                    for kind in KINDS:
                        local_tensor(state[kind]).zero_()


def make_states(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, State]:
    """By parameter, the state that AdamW would make in its first step, in its place now."""
    made: dict[Tensor, State] = {}
    for optimizer in optimizers:
        assert type(optimizer) is torch.optim.AdamW, f"{type(optimizer).__name__} has no such moments"
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state[param]
                assert not state, "moments are made before the first step"
                # A fused step reads its count where the parameter is.
                state[STEP] = torch.zeros((), dtype=torch.float32, device=param.device)
                state |= {kind: torch.zeros_like(param, requires_grad=False) for kind in KINDS}
                made[param] = state
    return made
