"""Gossip (NoLoCo, 2506.10911): who averages with whom in a round, and what an outer step then descends.

With phi_i the global params of island i, which are its own, theta_i its local params, and `group` its group:

    m_i <- momentum m_i + lr mean(theta_j - phi_j) + pull (mean(phi_j) - phi_i)        means over j in group
    phi_i <- phi_i + m_i        theta_i <- phi_i

What is pulled is added nowhere: over all islands of a group those terms sum to zero.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from outer.config import GossipConfig, OuterOptimizerConfig


def groups_of_round(seed: int, round_number: int, names: Collection[str], size: int) -> list[list[str]]:
    """Every name in one group, each sorted; groups have `size` names, or more where that does not divide them.

    4 names, size 2     round 0   a c | b d     round 1   a b | c d     round 2   a c | b d  ...
    """

    def place(name: str) -> bytes:
        return blake2b(f"{seed} {round_number} {name}".encode(), digest_size=16).digest()

    order = sorted(names, key=place)
    count = max(1, len(order) // size)
    return [sorted(order[first::count]) for first in range(count)]


def group_of(island: str, seed: int, round_number: int, names: Collection[str], size: int) -> list[str]:
    """The group that the island is in; `names` has its name."""
    return next(group for group in groups_of_round(seed, round_number, names, size) if island in group)


def optimizer_of(config: GossipConfig) -> OuterOptimizerConfig:
    """SGD that makes the step above of `outer_gradient`: its momentum buffer is -m."""
    return OuterOptimizerConfig(lr=1.0, momentum=config.momentum, nesterov=False)


@dataclass(frozen=True)
class Share:
    """One part as one island of the group gives it, fp32."""

    pseudo_grad: torch.Tensor
    """phi - theta, as everywhere."""
    params: torch.Tensor
    """phi"""


def outer_gradient(shares: Sequence[Share], own: Share, config: GossipConfig) -> torch.Tensor:
    """What island `own` descends in a part: -lr mean(theta_j - phi_j) - pull (mean(phi_j) - phi_own).

    `shares`, `own` among them, in the order of names, which is that of the sums.
    """
    progress, apart = torch.zeros_like(own.params), torch.zeros_like(own.params)
    for share in shares:
        progress += share.pseudo_grad
        # The difference first: it is exactly zero between equals, and small numbers are summed.
        apart += own.params - share.params
    return progress / len(shares) * config.lr + apart / len(shares) * config.pull
