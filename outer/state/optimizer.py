"""The outer optimizer: the step of torch.optim.SGD on parts of the global params, or Delayed
Nesterov (2401.09135).

In the delayed form each pseudo-gradient g of one of N islands is a push. The paper's c is 0:

    theta -= lr g / N,  v += g / N                 at every push
    theta -= lr momentum v,  v *= momentum         after every N of them

So N pushes of g_1 .. g_N make the step of SGD with Nesterov momentum on their mean. v holds the
decayed momentum plus the pushes since it was last applied.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.optim.sgd import sgd

from outer.config import OuterOptimizerConfig
from outer.state.alignment import UNCHANGED, Blend, find_blend
from outer.state.own_rule import build_own_rule


@dataclass(frozen=True)
class OuterStep:
    """One outer step on the mean of `num_given` islands. It treats elements independently."""

    config: OuterOptimizerConfig
    num_given: int = 1
    num_islands: int = 1
    """N of Delayed Nesterov."""
    pushes: int = 0
    """Pushes of Delayed Nesterov since the momentum last moved the part, before this step."""

    @property
    def pushes_after(self) -> int:
        """The value of `pushes` after this step."""
        return (
            (self.pushes + self.num_given) % self.num_islands
            if self.config.delayed
            else self.pushes
        )

    def blend(self, momentum: torch.Tensor, mean: torch.Tensor) -> Blend:
        """Return how the mean of a whole part is changed before the step; see `find_blend`."""
        return find_blend(mean, momentum, self.config)

    def apply(
        self,
        params: torch.Tensor,
        momentum: torch.Tensor,
        mean: torch.Tensor,
        blend: Blend = UNCHANGED,
    ) -> None:
        """Step `params` and `momentum` (fp32, in place), a part or any stretch of it, by the mean.

        `blend` is the blend of the whole part. Without momentum in the config `momentum` does not
        change. A part gets the same bits however it is cut into stretches of multiples of 64
        elements.
        """
        if self.config.rule is not None:
            rule = build_own_rule(self.config.rule, self.config.options)
            rule.step(params, momentum, mean, self.config.lr)
            return
        mean = blend.apply(mean, momentum)
        if self.config.delayed:
            self._push(params, momentum, mean)
            return
        has_momentum = self.config.momentum > 0
        # foreach would use other kernels for batches of small parts. The plain loop gives the same
        # bits on every mesh.
        sgd(
            [params],
            [mean],
            [momentum if has_momentum else None],
            lr=self.config.lr,
            momentum=self.config.momentum,
            nesterov=self.config.nesterov and has_momentum,
            weight_decay=0.0,
            dampening=0.0,
            maximize=False,
            foreach=False,
            fused=False,
        )

    def _push(self, params: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor) -> None:
        """Apply `num_given` pushes at once; the momentum moves the part at most once."""
        config = self.config
        # Each product is rounded separately. If it were fused with the sum, the bits would depend
        # on the machine.
        push = mean * (self.num_given / self.num_islands)
        params.sub_(push * config.lr)
        momentum.add_(push)
        if self.pushes + self.num_given >= self.num_islands:
            params.sub_(momentum * (config.lr * config.momentum))
            momentum.mul_(config.momentum)


class OuterOptimizer:
    """Descends averaged pseudo-gradients; `parts` (fp32, by part number) are updated in place.

    Momentum buffers exist from the start, filled with zeros, so that the data for a joiner do not
    depend on whether the part has been stepped.
    """

    def __init__(
        self, parts: Mapping[int, torch.Tensor], config: OuterOptimizerConfig, num_islands: int = 1
    ) -> None:
        """Create the optimizer. `num_islands` is N of Delayed Nesterov."""
        self._parts = dict(parts)
        self._config = config
        self._num_islands = num_islands
        self._pushes = dict.fromkeys(parts, 0)
        has_momentum = config.keeps_momentum
        if config.rule is not None:
            build_own_rule(config.rule, config.options)
        self._momentum = (
            {part: torch.zeros_like(v) for part, v in self._parts.items()} if has_momentum else {}
        )

    def step(self, pseudo_grads: Mapping[int, torch.Tensor], num_given: int = 1) -> None:
        """Step part by part. Parts that are not in `pseudo_grads` keep their values and momentum.

        `num_given` is the number of islands in each mean; only Delayed Nesterov uses it.
        """
        for part, pseudo_grad in pseudo_grads.items():
            values = self._parts[part]
            got = tuple(pseudo_grad.shape)
            expected = tuple(values.shape)
            assert got == expected, (
                f"part {part}: pseudo-gradient of shape {got}, expected {expected}"
            )
            step = self.next_step(part, num_given)
            momentum = self._momentum.get(part, NONE)
            step.apply(values, momentum, pseudo_grad, step.blend(momentum, pseudo_grad))
            self._pushes[part] = step.pushes_after

    def next_step(self, part: int, num_given: int = 1) -> OuterStep:
        """Return the step that `step` makes of the part with a mean of `num_given` islands."""
        return OuterStep(self._config, num_given, self._num_islands, self._pushes[part])

    def momentum(self, part: int) -> torch.Tensor:
        """Return the part's momentum buffer itself, fp32; zeros when the optimizer has no
        momentum.
        """
        return self._momentum[part] if self._momentum else torch.zeros_like(self._parts[part])

    def pushes(self, part: int) -> int:
        """Return the number of pushes since the momentum last moved the part; 0 when the
        optimizer is not delayed.
        """
        return self._pushes[part]

    def set_momentum(self, part: int, values: torch.Tensor, pushes: int = 0) -> None:
        """Set the part's momentum to another island's, which is copied. Does nothing without
        momentum.
        """
        self._pushes[part] = pushes
        if self._momentum:
            self._momentum[part].copy_(values)


NONE = torch.empty(0)
"""The momentum buffer of an optimizer without momentum."""
