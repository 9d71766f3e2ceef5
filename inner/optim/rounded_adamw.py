"""AdamW with moments in bf16, which are rounded stochastically.

A second moment changes by 1 - beta2 of a difference in a step, which is less than half of bf16's
distance between two numbers: rounded to the nearest it would often stand still. Stochastic rounding
goes up or down with probabilities that keep the mean:

    round(x): add 16 random bits to the bits of the fp32 number, and cut off the low 16 bits

The random bits follow from (seed, step, parameter, moment, row, column) alone, so equal
moments in fp32 become equal bits on every mesh.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from inner.model.counter_random import GAMMA, WORD, draw_16_bits, mix, signed
from inner.param_spec import ParamSlice
from inner.params import LocalParams, local_tensor

MOMENTS = "exp_avg", "exp_avg_sq"


class RoundedAdamW(Optimizer):
    """Makes AdamW's step in fp32, and keeps the moments in bf16 between steps. Names of states are
    AdamW's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        params: LocalParams,
        seed: int,
    ) -> None:
        """Create the optimizer. `params` tells which rectangles of the parameters this rank
        holds.
        """
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._params = params
        self._seed = seed
        self._slices: dict[Tensor, list[int]] = {}
        """The slices that lie in each live parameter."""
        for index in range(len(params.slices)):
            for param in params.copies(index):
                self._slices.setdefault(param, []).append(index)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step(param, param.grad, group)

    def _step(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state |= {
                name: torch.zeros_like(param, dtype=torch.bfloat16, requires_grad=False)
                for name in MOMENTS
            }
        moments = [local_tensor(state[name]).float() for name in MOMENTS]
        (beta1, beta2) = group["betas"]
        adamw(
            [local_tensor(param)],
            [local_tensor(grad)],
            [moments[0]],
            [moments[1]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for name, exact in zip(MOMENTS, moments, strict=True):
            self._keep(local_tensor(state[name]), exact, param, name, state["step"])

    def _keep(self, kept: Tensor, exact: Tensor, param: Tensor, moment: str, step: Tensor) -> None:
        """Round this rank's part of a moment into the memory of the state."""
        for index in self._slices.get(param, []):
            held = self._params.slices[index]
            keys = row_keys(f"{self._seed}/{held.name}/{moment}", held, step)
            draws = draw_16_bits(keys, held.cols[0], held.shape[1])
            source, target = (self._params.local_view(index, each) for each in (exact, kept))
            target.copy_(round_stochastically(source.reshape(held.shape), draws).view(target.shape))


def row_keys(name: str, held: ParamSlice, step: Tensor) -> Tensor:
    """Return the keys of a slice's rows in a step (0-dim), int64. The host does not wait for the
    step.
    """
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % WORD
    of_step = mix(step.long() * signed(GAMMA) + signed(first))
    rows = torch.arange(held.rows[0] + 1, held.rows[1] + 1, device=step.device)
    return mix(of_step + rows * signed(GAMMA))


def round_stochastically(exact: Tensor, draws: Tensor) -> Tensor:
    """Return fp32 values in bf16, rounded up in magnitude if the low 16 bits and the draw (int16)
    add up to 2^16 or more.
    """
    bits = exact.contiguous().view(torch.int32) + (draws.int() & 0xFFFF)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)
