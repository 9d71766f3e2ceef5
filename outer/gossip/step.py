"""The maths of gossip (NoLoCo, 2506.10911): the groups of a round, and the gradient of an outer
step.

With phi_i the global params of island i, which are its own, theta_i its local params, and `group`
its group:

    m_i <- momentum m_i + lr mean(theta_j - phi_j) + pull (mean(phi_j) - phi_i)    j in group
    phi_i <- phi_i + m_i        theta_i <- phi_i

The pull changes no average: over all islands of a group its terms sum to zero.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from outer.config import GossipConfig, OuterOptimizerConfig
from outer.merges.mean import hold_between


def groups_of_round(
    seed: int, round_number: int, names: Collection[str], size: int
) -> list[list[str]]:
    """Split all names into groups, each sorted, of `size` names, or more where `size` does not
    divide their number.

    4 names, size 2     round 0   a c | b d     round 1   a b | c d     round 2   a c | b d  ...
    """

    def place(name: str) -> bytes:
        return blake2b(f"{seed} {round_number} {name}".encode(), digest_size=16).digest()

    order = sorted(names, key=place)
    count = max(1, len(order) // size)
    return [sorted(order[first::count]) for first in range(count)]


def group_of(
    island: str, seed: int, round_number: int, names: Collection[str], size: int
) -> list[str]:
    """Return the island's group. `names` contains its name."""
    return next(
        group for group in groups_of_round(seed, round_number, names, size) if island in group
    )


def build_optimizer_config(config: GossipConfig) -> OuterOptimizerConfig:
    """Return the config of an SGD whose step on `outer_gradient` is the step above. Its momentum
    buffer is -m.
    """
    return OuterOptimizerConfig(lr=1.0, momentum=config.momentum, nesterov=False)


@dataclass(frozen=True)
class Share:
    """One part of one island's share, fp32."""

    pseudo_grad: torch.Tensor
    """phi - theta: global minus local params."""
    params: torch.Tensor
    """phi: global params."""


def mean_values(shares: Sequence[Share]) -> torch.Tensor:
    """Return the mean over a group of a part of buffers, whose shares hold the local values in
    place of a pseudo-gradient. `shares` is in the order of names, which is the order of summation.
    """
    total = torch.zeros_like(shares[0].pseudo_grad)
    for share in shares:
        total += share.pseudo_grad
    values = [share.pseudo_grad for share in shares]
    return hold_between(total / len(shares), values, [1.0] * len(shares))


def outer_gradient(shares: Sequence[Share], own: Share, config: GossipConfig) -> torch.Tensor:
    """Return the gradient for a part of island `own`: -lr mean(theta_j - phi_j) - pull (mean(phi_j)
    - phi_own).

    `shares` contains `own` and is in the order of names, which is the order of summation.
    """
    progress = torch.zeros_like(own.params)
    apart = torch.zeros_like(own.params)
    for share in shares:
        progress += share.pseudo_grad
        # Params are subtracted before they are summed: the difference of equal params is exactly
        # zero, and the sums stay small.
        apart += own.params - share.params
    return progress / len(shares) * config.lr + apart / len(shares) * config.pull
