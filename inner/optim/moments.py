"""AdamW's moments next to the parameters, so that islands can average them (DES-LOC, 2505.22549;
Local Adam).

The name of a moment is its parameter's name followed by `@exp_avg` or `@exp_avg_sq`. It is sharded
like its parameter.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inner.param_spec import ParamSlice, ParamSpec
from inner.params import LocalParams, local_tensor, pinned_like, read_to_host

KINDS = ("exp_avg", "exp_avg_sq")
STEP = "step"
OptimizerState = dict[str, Tensor]


class ParamsAndMoments:
    """Reads and writes this rank's slices of parameters and moments in place, with the interface of
    LocalParams.

    Build it before the first step: it creates the moments as zeros, which AdamW itself does only in
    its first step.
    """

    specs: list[ParamSpec]
    """The model's parameters, each of which has two moments unless `has_moments` is false."""
    slices: list[ParamSlice]
    """Slices of the parameters, then of the first moments, then of the second moments."""

    def __init__(
        self,
        params: LocalParams,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Collection[str] | None = None,
    ) -> None:
        """Create the moments. Every optimizer must be an AdamW, possibly quasi-hyperbolic, and not
        a wrapper around it.

        `names`: the parameters of the whole model that have moments; None: all.
        """
        self._params = params
        self.specs = [
            replace(spec, has_moments=names is None or spec.name in names) for spec in params.specs
        ]
        self.slices = list(params.slices)
        self._moments: list[list[Tensor]] = []
        """Of each slice of moments, this rank's part of the state of each copy of its parameter."""
        self._optimizers = optimizers
        states = make_states(optimizers)
        self._states: dict[str, list[OptimizerState]] = {}
        self._moments_of: dict[str, list[Tensor]] = defaultdict(list)
        """The same parts by the name of the parameter."""
        for kind in KINDS:
            for index, param_slice in enumerate(params.slices):
                if names is not None and param_slice.name not in names:
                    continue
                self._states[param_slice.name] = [states[param] for param in params.copies(index)]
                self.slices.append(replace(param_slice, name=f"{param_slice.name}@{kind}"))
                kept = [state[kind] for state in self._states[param_slice.name]]
                self._moments.append([params.local_view(index, moment) for moment in kept])
                self._moments_of[param_slice.name] += self._moments[-1]

    def read_all(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Return slices by index, see `LocalParams.read_all`."""
        return read_to_host({index: self.matrix(index) for index in indices})

    def write_all(self, values: Mapping[int, Tensor]) -> None:
        """Write slices by index, see `LocalParams.write_all`."""
        for index, new in values.items():
            self.write(index, new)

    def pinned(self, index: int) -> Tensor | None:
        """Return memory for new values of slice `index`, see `LocalParams.pinned`."""
        return pinned_like(self.matrix(index))

    def matrix(self, index: int) -> Tensor:
        """Return slice `index` in its own memory, 2-D fp32."""
        number = index - len(self._params.slices)
        if number < 0:
            return self._params.matrix(index)
        return self._moments[number][0].reshape(self.slices[index].shape)

    def write(self, index: int, values: Tensor) -> None:
        """Copy `values` (2-D, shape of the slice) into the live tensor in place, and into all
        copies of a tied tensor.
        """
        number = index - len(self._params.slices)
        if number < 0:
            self._params.write(index, values)
            return
        target = self.slices[index]
        assert values.shape == target.shape, (
            f"{target.name}: got values of shape {tuple(values.shape)}, need {target.shape}"
        )
        for moment in self._moments[number]:
            moment.copy_(values.view(moment.shape), non_blocking=True)

    def live(self, index: int) -> Tensor | None:
        """Return slice `index` itself, to be written in place, or None if that is not possible (see
        LocalParams).
        """
        return self._params.live(index) if index < len(self._params.slices) else None

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Set the step counts of AdamW's bias correction, by parameter name. Names that this rank
        does not hold are ignored.

        A count of 0 also zeroes both moments, because AdamW would divide a non-zero first moment by
        almost nothing. For the same reason all first moments are limited by their second moments,
        see hold_within_second.
        """
        for name, count in steps.items():
            for state in self._states.get(name, []):
                state[STEP].fill_(count)
            if count == 0:
                for moment in self._moments_of.get(name, []):
                    moment.zero_()
        for optimizer in self._optimizers:
            hold_within_second(optimizer)


def make_states(optimizers: Sequence[torch.optim.Optimizer]) -> dict[Tensor, OptimizerState]:
    """Create the states that AdamW would create in its first step, and return them by parameter."""
    states: dict[Tensor, OptimizerState] = {}
    for optimizer in optimizers:
        assert isinstance(optimizer, torch.optim.AdamW), (
            f"{type(optimizer).__name__} has no such moments"
        )
        for group in optimizer.param_groups:
            for param in group["params"]:
                state = optimizer.state[param]
                assert not state, "moments must be created before the first step"
                # A fused step reads its step count on the parameter's device.
                state[STEP] = torch.zeros((), dtype=torch.float32, device=param.device)
                state |= {kind: torch.zeros_like(param, requires_grad=False) for kind in KINDS}
                states[param] = state
    return states


@torch.no_grad()
def hold_within_second(optimizer: torch.optim.Optimizer) -> None:
    """Limit each element of a first moment m to twice the largest value that AdamW can reach with
    its second moment v.

        |m| <= 2 c sqrt(v),   c^2 = sum_k ((1 - b1) b1^k)^2 / ((1 - b2) b2^k) = (1 - b1)^2 / ((1 -
                              b2) (1 - b1^2 / b2))

    The Cauchy-Schwarz inequality for the two sums over an island's gradients gives the largest
    value. The limit therefore changes neither the moments of one AdamW nor means of both moments.
    It matters when only first moments are averaged: in the row of a token that occurs only in other
    islands' texts, v is 0 here, and AdamW would divide m by its epsilon.
    """
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        if beta1**2 >= beta2:
            continue  # The sum diverges, so there is no bound.
        limit = 2 * (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5
        for param in group["params"]:
            first, second = (local_tensor(optimizer.state[param][kind]) for kind in KINDS)
            most = second.sqrt().mul_(limit)
            torch.minimum(first, most, out=first)
            torch.maximum(first, most.neg_(), out=first)
