"""AdamW's moments next to the parameters, so that islands can average them (DES-LOC, 2505.22549; Local Adam).

A moment has the name of its parameter followed by `@exp_avg` or `@exp_avg_sq`, and is sharded like it on every mesh.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inner.param_spec import ParamSlice, ParamSpec
from inner.params import LocalParams, local_tensor, pinned_like, read_to_host

KINDS = ("exp_avg", "exp_avg_sq")
STEP = "step"
OptimizerState = dict[str, Tensor]


class ParamsAndMoments:
    """Reads and writes this rank's slices of parameters and moments in place, with the interface of LocalParams.

    Build it before the first step: it creates the moments as zeros, which AdamW itself does only in its first step.
    """

    specs: list[ParamSpec]
    """The model's parameters, each of which has two moments."""
    slices: list[ParamSlice]
    """Slices of the parameters, then of the first moments, then of the second moments."""

    def __init__(self, params: LocalParams, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Every optimizer must be an AdamW, which may be quasi-hyperbolic, and no wrapper of one."""
        self._params = params
        self.specs = params.specs
        self.slices = list(params.slices)
        self._moments: list[list[Tensor]] = []
        self._optimizers = optimizers
        states = make_states(optimizers)
        self._states: dict[str, list[OptimizerState]] = {}
        for kind in KINDS:
            for index, param_slice in enumerate(params.slices):
                self._states[param_slice.name] = [states[param] for param in params.copies(index)]
                self.slices.append(replace(param_slice, name=f"{param_slice.name}@{kind}"))
                self._moments.append([state[kind] for state in self._states[param_slice.name]])

    def read_all(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Slices by index, as `LocalParams.read_all`."""
        return read_to_host({index: self.matrix(index) for index in indices})

    def write_all(self, values: Mapping[int, Tensor]) -> None:
        """Write slices by index, as `LocalParams.write_all`."""
        for index, new in values.items():
            self.write(index, new)

    def pinned(self, index: int) -> Tensor | None:
        """Memory for new values of slice `index`, as `LocalParams.pinned`."""
        return pinned_like(self.matrix(index))

    def matrix(self, index: int) -> Tensor:
        """Slice `index` where it lies, 2-D fp32."""
        number = index - len(self._params.slices)
        if number < 0:
            return self._params.matrix(index)
        return local_tensor(self._moments[number][0]).view(self.slices[index].shape)

    def write(self, index: int, values: Tensor) -> None:
        """Copy `values` (2-D, shape of the slice) into the live tensor in place, and into all copies if it is tied."""
        number = index - len(self._params.slices)
        if number < 0:
            self._params.write(index, values)
            return
        target = self.slices[index]
        assert values.shape == target.shape, f"{target.name}: got {tuple(values.shape)}, holds {target.shape}"
        for moment in self._moments[number]:
            local_tensor(moment).view(target.shape).copy_(values, non_blocking=True)

    def live(self, index: int) -> Tensor | None:
        """Slice `index` itself, to be written in place, where that is possible (see LocalParams); else None."""
        return self._params.live(index) if index < len(self._params.slices) else None

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Set the step counts of AdamW's bias correction, by parameter name; names that this rank lacks are ignored.

        A count of 0 also zeroes both moments, because AdamW would divide a non-zero first moment by almost nothing. For
        the same reason all first moments are held within what the second moments beside them allow.
        """
        for name, count in steps.items():
            for state in self._states.get(name, []):
                state[STEP].fill_(count)
                if count == 0:
                    for kind in KINDS:
                        local_tensor(state[kind]).zero_()
        for optimizer in self._optimizers:
            hold_within_second(optimizer)


def make_states(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, OptimizerState]:
    """Create the states that AdamW would create in its first step. Returns them by parameter."""
    states: dict[Tensor, OptimizerState] = {}
    for optimizer in optimizers:
        assert isinstance(optimizer, torch.optim.AdamW), f"{type(optimizer).__name__} has no such moments"
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state[param]
                assert not state, "moments are made before the first step"
                # A fused step reads its count on the parameter's device.
                state[STEP] = torch.zeros((), dtype=torch.float32, device=param.device)
                state |= {kind: torch.zeros_like(param, requires_grad=False) for kind in KINDS}
                states[param] = state
    return states


@torch.no_grad()
def hold_within_second(optimizer: torch.optim.Optimizer) -> None:
    """Hold the elements of first moments m within twice what AdamW itself can make beside the second moments v.

        |m| <= 2 c sqrt(v),   c^2 = sum_k ((1 - b1) b1^k)^2 / ((1 - b2) b2^k) = (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2))

    That is Cauchy and Schwarz's inequality for the two sums over an island's gradients, so it changes nothing of what
    AdamW has made, nor of means of both moments. The mean of first moments alone may lie beyond: in the row of a token
    that only other islands' texts have, v is 0 here, and AdamW would divide m by its epsilon.
    """
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        if beta1**2 >= beta2:
            continue  # There is no such bound.
        limit = 2 * (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5
        for param in group["params"]:
            first, second = (local_tensor(optimizer.state[param][kind]) for kind in KINDS)
            most = second.sqrt().mul_(limit)
            torch.minimum(first, most, out=first)
            torch.maximum(first, most.neg_(), out=first)
