"""The router of a mixture of experts: which experts compute each token, and with which weights.

    z = W x           in fp32, whatever the compute dtype
    s                 softmax(z), or the sigmoid of each z
    choice            the `per_token` largest s + b, of the best groups; of equal ones the lower
                      index
    g                 s of the chosen, divided by their sum if the config says so, times `scale`

b is the bias that balances the experts (2408.15664). It is a saved buffer and no parameter: it
affects the choice and not the weights, and the trainer moves it once per step.

Shape suffixes: N positions of a micro-batch, D dim, X experts, J experts per token, G groups.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.config import ExpertsConfig
from inner.model.kept import keep
from inner.model.local_part import local_part
from inner.model.sizes import ModelSizes

SMALLEST_SUM = 1e-20
"""Added to the sum by which weights are divided, as in DeepSeek-V3."""


class Routing(NamedTuple):
    """The router's decision for the positions of a micro-batch."""

    chosen_NJ: Tensor
    """The chosen experts of each position in rising order, int64."""
    weights_NJ: Tensor
    """Their weights, fp32."""
    logits_NX: Tensor
    """fp32."""
    scores_NX: Tensor
    """fp32."""


class Router(nn.Module):
    """Chooses experts. Its weight stays in fp32 also where the rest of a block computes in bf16."""

    keeps_fp32 = True
    saved_buffers = ("bias",)
    bias: Tensor

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        assert sizes.experts is not None, "a router belongs to a mixture of experts"
        self.config = sizes.experts
        self.weight = nn.Parameter(torch.empty(sizes.experts.number, sizes.dim))
        self.register_buffer("bias", torch.zeros(sizes.experts.number))

    def forward(self, x_ND: Tensor) -> Routing:
        weight = local_part(self.weight)
        logits_NX = F.linear(x_ND.float(), weight)
        is_softmax = self.config.scores == "softmax"
        scores_NX = logits_NX.softmax(dim=-1) if is_softmax else logits_NX.sigmoid()
        # A repeated forward must not choose anew: near a tie it could find other experts.
        chosen_NJ = keep(lambda: choose(scores_NX.detach() + self.bias, self.config))
        weights_NJ = scores_NX.gather(-1, chosen_NJ)
        if self.config.renormalise:
            weights_NJ = weights_NJ / (weights_NJ.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        return Routing(chosen_NJ, weights_NJ * self.config.scale, logits_NX, scores_NX)


def choose(ranks_NX: Tensor, config: ExpertsConfig) -> Tensor:
    """Return the experts (N, per_token) with the largest values, in rising order. Of equal values
    the lower index is chosen.
    """
    eligible_NX = _keep_groups(ranks_NX, config) if config.groups > 1 else ranks_NX
    best_NJ = _largest(eligible_NX, config.per_token)
    return best_NJ.sort(dim=-1).values


def _keep_groups(ranks_NX: Tensor, config: ExpertsConfig) -> Tensor:
    """Return the values with -inf outside the best groups. A group is rated by the sum of its two
    largest values.
    """
    groups_NGM = ranks_NX.unflatten(-1, (config.groups, config.num_per_group))
    ratings_NG = groups_NGM.topk(2, dim=-1).values.sum(dim=-1)
    is_kept_NG = torch.zeros_like(ratings_NG, dtype=torch.bool)
    is_kept_NG.scatter_(-1, _largest(ratings_NG, config.kept_groups), True)
    return groups_NGM.masked_fill(~is_kept_NG[..., None], -torch.inf).flatten(-2)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values of the last dimension. torch.topk does not say which
    of equal values it takes.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
