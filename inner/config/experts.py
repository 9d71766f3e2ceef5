"""Config of a mixture of experts, of latent attention, and of multi-token prediction."""

from typing import Literal

from pydantic import Field, model_validator

from inner.config.section import Section

ROUTER_SUMS = 4
"""Numbers that ranks add up per layer and step beside the tokens of each expert: both losses of the
router, dropped choices, and micro-batches in which it was not finite."""


class ExpertsConfig(Section):
    """A mixture of experts, which replaces the feed-forward of a block. A router chooses a few
    experts for each token, and the results of the chosen are added up with the router's weights.
    """

    number: int = Field(ge=2, le=4096)
    """Number of routed experts of a block."""
    per_token: int = Field(ge=1)
    """Number of experts that are chosen for each token."""
    dim: int = Field(ge=8)
    """Width of the hidden layer of one expert, a multiple of 8."""
    shared: int = Field(default=0, ge=0)
    """Number of experts that every token uses beside the chosen ones. They are computed as one
    feed-forward of width shared x dim."""
    dense_layers: int = Field(default=0, ge=0)
    """Number of blocks at the beginning of the model that keep a feed-forward of width
    model.ffn_dim."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become scores: `softmax` over all experts, or the `sigmoid` of
    each."""
    groups: int = Field(default=1, ge=1)
    """Number of equal groups of experts of which kept_groups are chosen first, by the sum of their
    two best scores."""
    kept_groups: int = Field(default=1, ge=1)
    """Number of groups from which a token's experts are chosen."""
    renormalise: bool = True
    """Whether the weights of a token's chosen experts are divided by their sum."""
    scale: float = Field(default=1.0, gt=0)
    """Factor by which the weights are multiplied."""
    capacity: float | None = Field(default=None, gt=0)
    """Largest number of a sequence's tokens per expert, as a multiple of the mean number. Of the
    tokens that chose an expert, those with the highest weights are kept; the expert adds nothing to
    the others. Every drop is counted. null: no limit, nothing is dropped."""

    @property
    def num_per_group(self) -> int:
        return self.number // self.groups

    @model_validator(mode="after")
    def _choices_exist(self) -> "ExpertsConfig":
        if self.dim % 8:
            raise ValueError(
                f"dim ({self.dim}) must be a multiple of 8, because grouped matrix products need "
                f"rows of whole 16 bytes; try {self.dim // 8 * 8 or 8} or {self.dim // 8 * 8 + 8}"
            )
        if self.number % self.groups:
            allowed = [n for n in range(1, self.number + 1) if self.number % n == 0]
            raise ValueError(
                f"groups ({self.groups}) must divide number ({self.number}); allowed: {allowed}"
            )
        if self.kept_groups > self.groups:
            raise ValueError(
                f"kept_groups ({self.kept_groups}) is more than groups ({self.groups}); lower it"
            )
        if self.groups > 1 and self.num_per_group < 2:
            raise ValueError(
                f"groups ({self.groups}) of one expert each; a group is rated by its two best "
                f"experts, so set groups to 1, or to at most {self.number // 2}"
            )
        eligible = self.kept_groups * self.num_per_group
        if self.per_token > eligible:
            raise ValueError(
                f"per_token ({self.per_token}) is more than the {eligible} experts of the kept "
                f"groups (kept_groups {self.kept_groups} x {self.num_per_group} experts); lower "
                "per_token or raise kept_groups"
            )
        return self


class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, 2405.04434): queries, keys and values are projected
    from narrow vectors, and position is in a separate part of queries and keys.
    """

    q_rank: int | None = Field(default=None, ge=8)
    """Width of the vector from which queries are projected. null: they are projected from the
    residual stream."""
    kv_rank: int = Field(ge=8)
    """Width of the vector from which the keys and values of all heads are projected."""
    nope_dim: int = Field(ge=2)
    """Size of the part of a query or key head that has no position."""
    rope_dim: int = Field(ge=2)
    """Size of the part that RoPE rotates, an even number. All heads share this part of the key."""
    value_dim: int = Field(ge=2)
    """Size of a value head, at most nope_dim + rope_dim."""

    @property
    def qk_dim(self) -> int:
        """Size of a query or key head."""
        return self.nope_dim + self.rope_dim

    @model_validator(mode="after")
    def _sizes_fit(self) -> "LatentConfig":
        if self.rope_dim % 2:
            raise ValueError(
                f"rope_dim ({self.rope_dim}) must be even, because RoPE rotates pairs; "
                f"try {self.rope_dim - 1} or {self.rope_dim + 1}"
            )
        if self.value_dim > self.qk_dim:
            raise ValueError(
                f"value_dim ({self.value_dim}) is more than nope_dim + rope_dim ({self.qk_dim}); "
                "lower value_dim"
            )
        return self


class PredictConfig(Section):
    """Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2): in training, extra depths
    behind the last layer predict the tokens after the next one. Only their gradients are of use:
    reported losses, evaluation and generated text are those of the model without them.
    """

    depths: int = Field(ge=1, le=64)
    """Number of extra depths. Depth d predicts the token d + 1 positions ahead. Each has one block
    like the model's last layer, and the embedding and the head of the model. It must be less than
    data.seq_len."""
    weight: float = Field(default=0.3, ge=0)
    """Weight of the mean of the depths' losses, which is added to the loss (DeepSeek-V3 began with
    0.3 and ended with 0.1)."""


class BalanceConfig(Section):
    """How training keeps the experts of a mixture equally loaded. Reported losses do not include
    these terms.
    """

    bias_speed: float = Field(default=0.001, ge=0, lt=1)
    """Balance without a loss (2408.15664): after each step, the bias of an expert with fewer tokens
    than the mean rises by this amount, and that of one with more falls. The bias affects which
    experts are chosen, and not their weights. 0: the biases stay as they are."""
    sequence_loss: float = Field(default=0.0, ge=0)
    """Weight of the loss that is smallest if each sequence uses its experts equally (DeepSeek-V3,
    2412.19437, eq. 17; 1e-4 there). 0: no such term."""
    router_z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log of the router's softmax denominator (ST-MoE, 2202.08906; 1e-3
    there), which keeps the router's logits from drifting. 0: no such term."""
