"""The outer optimizer: torch.optim.SGD over the parts of the global params, or Delayed Nesterov (2401.09135).

In the delayed form each pseudo-gradient g of one of N islands is a push; c of 2401.09135 is 0:

    theta -= lr g / N,  v += g / N                 at every push
    theta -= lr momentum v,  v *= momentum         after every N of them

So N pushes of g_1 .. g_N make the step of SGD with Nesterov momentum on their mean; v holds the decayed momentum plus
the pushes since.
"""

from collections.abc import Mapping

import torch

from outer.config import OuterOptimizerConfig


class OuterOptimizer:
    """Descends averaged pseudo-gradients; `parts` (fp32, by part number) are updated in place.

    Momentum buffers exist from the start, filled with zeros, so that what a joiner receives does not depend on whether
    the part has been stepped.
    """

    def __init__(self, parts: Mapping[int, torch.Tensor], config: OuterOptimizerConfig, num_islands: int = 1) -> None:
        """`num_islands` is N of Delayed Nesterov."""
        self._parts, self._config, self._num_islands = dict(parts), config, num_islands
        self._pushes = dict.fromkeys(parts, 0)
        self._has_momentum = config.momentum > 0
        # With more ranks than parts some ranks carry none, and SGD refuses an empty list.
        params = [{"params": list(self._parts.values())}]
        # foreach would use other kernels for batches of small parts; the plain loop gives the same bits on every mesh.
        self._sgd = torch.optim.SGD(
            params,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov and self._has_momentum,
            foreach=False,
        )
        if self._has_momentum:
            for values in self._parts.values():
                self._sgd.state[values]["momentum_buffer"] = torch.zeros_like(values)

    def step(self, pseudo_grads: Mapping[int, torch.Tensor], num_given: int = 1) -> None:
        """Descend, part by part; parts not in `pseudo_grads` keep their values and momentum.

        `num_given` is the number of islands in each mean; only Delayed Nesterov uses it.
        """
        for part, pseudo_grad in pseudo_grads.items():
            values = self._parts[part]
            got, expected = tuple(pseudo_grad.shape), tuple(values.shape)
            assert got == expected, f"part {part}: pseudo-gradient of shape {got}, expected {expected}"
            if self._config.delayed:
                self._push(part, pseudo_grad, num_given)
            else:
                values.grad = pseudo_grad
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    def momentum(self, part: int) -> torch.Tensor:
        """The part's momentum buffer itself, fp32; zeros when the optimizer has no momentum."""
        values = self._parts[part]
        return self._sgd.state[values]["momentum_buffer"] if self._has_momentum else torch.zeros_like(values)

    def pushes(self, part: int) -> int:
        """Number of pushes since the momentum moved the part; 0 when the optimizer is not delayed."""
        return self._pushes[part]

    def set_momentum(self, part: int, values: torch.Tensor, pushes: int = 0) -> None:
        """Continue the part from another island's momentum, which is copied; does nothing without momentum."""
        self._pushes[part] = pushes
        if self._has_momentum:
            self.momentum(part).copy_(values)

    def _push(self, part: int, mean: torch.Tensor, num_given: int) -> None:
        """Apply `num_given` pushes at once; the momentum moves the part at most once."""
        values, momentum, config = self._parts[part], self.momentum(part), self._config
        # Each product is rounded on its own: fused with the sum, the bits would depend on the machine.
        push = mean * (num_given / self._num_islands)
        values.sub_(push * config.lr)
        momentum.add_(push)
        self._pushes[part] += num_given
        if self._pushes[part] >= self._num_islands:
            values.sub_(momentum * (config.lr * config.momentum))
            momentum.mul_(config.momentum)
            self._pushes[part] %= self._num_islands
