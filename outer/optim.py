"""The outer optimizer: torch.optim.SGD over the parts of the global params."""

from collections.abc import Mapping

import torch

from outer.config import OuterOptimizerConfig


class OuterOptimizer:
    """Descends averaged pseudo-gradients; `parts` (fp32, by part number) are updated in place.

    Momentum is explicit from the start: a part never stepped has a buffer of zeros, so that what an island
    gives to a joiner does not depend on whether it has stepped.
    """

    def __init__(self, parts: Mapping[int, torch.Tensor], config: OuterOptimizerConfig) -> None:
        self._parts = dict(parts)
        self._has_momentum = config.momentum > 0
        # An island with more ranks than parts leaves some with none, and SGD refuses an empty list.
        params = [{"params": list(self._parts.values())}]
        # foreach would batch small parts by other kernels; the plain loop gives the same bits on every mesh.
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

    def step(self, pseudo_grads: Mapping[int, torch.Tensor]) -> None:
        """Descend, part by part; parts not in `pseudo_grads` keep their values and momentum."""
        for part, pseudo_grad in pseudo_grads.items():
            values = self._parts[part]
            got, expected = tuple(pseudo_grad.shape), tuple(values.shape)
            assert got == expected, f"part {part}: pseudo-gradient of shape {got}, expected {expected}"
            values.grad = pseudo_grad
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    def momentum(self, part: int) -> torch.Tensor:
        """The part's momentum buffer itself, fp32; zeros when the optimizer has no momentum."""
        values = self._parts[part]
        return self._sgd.state[values]["momentum_buffer"] if self._has_momentum else torch.zeros_like(values)

    def set_momentum(self, part: int, values: torch.Tensor) -> None:
        """Continue the part from another island's momentum (copied); nothing to do without momentum."""
        if self._has_momentum:
            self.momentum(part).copy_(values)
