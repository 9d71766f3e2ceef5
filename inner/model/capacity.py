"""The limit on the tokens of a sequence that one expert computes.

    C = ceil(capacity x T J / X)    T tokens of the sequence, J experts per token, X experts

Of a sequence's tokens that chose an expert, the C with the highest weights keep it; of equal ones
the earlier. Because the limit is per sequence, it does not depend on the mesh or the micro-batch.

Shape suffixes: B sequences, S positions, N = B S, J experts per token, R = N J choices.
"""

import torch
from torch import Tensor

from inner.config import ExpertsConfig


@torch.no_grad()
def find_excess(
    chosen_NJ: Tensor, weights_NJ: Tensor, is_input_BS: Tensor, config: ExpertsConfig
) -> Tensor:
    """Return which choices are above the limit (N, J)."""
    assert config.capacity is not None, "without a capacity nothing is dropped"
    (B, S) = is_input_BS.shape
    (N, J) = chosen_NJ.shape
    num_tokens_B = is_input_BS.sum(dim=1)
    limit_B = (config.capacity * num_tokens_B.double() * J / config.number).ceil().long()
    sequence_N = torch.arange(B, device=chosen_NJ.device).repeat_interleave(S)
    queue_R = (sequence_N[:, None] * config.number + chosen_NJ).flatten()
    # Padding waits behind all tokens.
    rank_R = torch.where(is_input_BS.reshape(N, 1), weights_NJ, -torch.inf).flatten()
    by_weight_R = rank_R.argsort(descending=True, stable=True)
    order_R = by_weight_R[queue_R[by_weight_R].argsort(stable=True)]
    lengths = torch.zeros(B * config.number, dtype=torch.int64, device=chosen_NJ.device)
    lengths.scatter_add_(0, queue_R, torch.ones_like(queue_R))
    begins = lengths.cumsum(0) - lengths
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(N * J, device=order_R.device)
    place_R -= begins[queue_R]
    return (place_R >= limit_B.repeat_interleave(S * J)).view(N, J)
