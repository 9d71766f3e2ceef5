"""The scaling law of Chinchilla (2203.15556): which model size and how many tokens suit a compute
budget best.

It was fitted to models of 70 million to 16 billion parameters on web text. Outside of that range it
is an extrapolation, and losses on other text differ. Sizes N and tokens D are counts, compute C is
6 N D floating-point operations, and losses are in nats per token.
"""

from dataclasses import dataclass

FLOPS_PER_PARAM_AND_TOKEN = 6.0
"""The factor in C = 6 N D: forward and backward of each weight, without attention."""

# Approach 3, equation 10: L(N, D) = E + A / N^ALPHA + B / D^BETA.
E = 1.69
A = 406.4
B = 410.7
ALPHA = 0.34
BETA = 0.28


@dataclass(frozen=True)
class Allocation:
    """A model's size and the tokens that it trains on."""

    params: float
    tokens: float

    @property
    def flops(self) -> float:
        """Compute of the training in floating-point operations."""
        return FLOPS_PER_PARAM_AND_TOKEN * self.params * self.tokens

    @property
    def loss(self) -> float:
        """The loss that Chinchilla's fit predicts."""
        return E + A / self.params**ALPHA + B / self.tokens**BETA


def best_for_compute(flops: float) -> Allocation:
    """Return the size and tokens with the least loss for a compute budget (2203.15556, equation 4).

    N = G (C / 6)^(BETA / (ALPHA + BETA)) with G = (ALPHA A / (BETA B))^(1 / (ALPHA + BETA)), and D
    = C / (6 N).
    """
    scale = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    params = scale * (flops / FLOPS_PER_PARAM_AND_TOKEN) ** (BETA / (ALPHA + BETA))
    return Allocation(params, flops / FLOPS_PER_PARAM_AND_TOKEN / params)


def cheapest_for_loss(loss: float) -> Allocation:
    """Return the size and tokens that reach a loss above E with the least compute.

    At this optimum the parts of L - E that size and tokens cause have the ratio BETA : ALPHA.
    """
    assert loss > E, f"no model reaches {loss}, which is at most {E}"
    excess = (loss - E) / (ALPHA + BETA)
    return Allocation((A / (excess * BETA)) ** (1 / ALPHA), (B / (excess * ALPHA)) ** (1 / BETA))


def overhead(run: Allocation) -> float:
    """Return the compute beyond the least that reaches the same loss: 0.2 is 20 % more.

    A model of half the best size costs 20 % more to reach the same loss, one of 30 % of the best
    size costs twice as much (H. de Vries, "Go smol or go home", 2023, from the same fit).
    """
    return run.flops / cheapest_for_loss(run.loss).flops - 1
