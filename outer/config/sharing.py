"""Settings for merging and encoding pseudo-gradients and, in gossip, sending them to a few other
islands.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from outer.config.own_code import Options, is_import_path, one_of
from outer.config.section import Section

ExpertCodec = Literal["fp32", "bf16", "fp16", "int8", "int4", "e3m0", "stat2"]
"""Codecs of ours that encode means, too."""
MERGE_RULES = (
    "mean",
    "trimmed_mean",
    "geometric_median",
    "centered_clip",
    "radial",
    "contributors",
)


class MergeConfig(Section):
    """Rules for merging the participants' pseudo-gradients, part by part, and for leaving out
    some of them.
    """

    rule: Annotated[str, one_of(MERGE_RULES, "my_package.merges:Softened")] = "mean"
    """mean, trimmed_mean, geometric_median, centered_clip, radial or contributors, or a rule of
    your own by its import path (docs/extending.md). With three islands or more, trimmed_mean,
    geometric_median and centered_clip tolerate a few poisoned islands. radial is
    radial-directional averaging (2604.21428), meant for eight islands or more; it reduces drift
    and does not protect against poisoning. contributors averages each element over the islands
    that sent it, for sparse codecs."""
    options: Options = Field(default_factory=dict)
    """Settings of a rule of your own: keyword arguments of its class or function."""
    experts: Literal["tokens", "routed"] = "tokens"
    """Weights of the islands in the mean of an expert of a mixture. tokens: those of all other
    params, the tokens that an island has trained on. routed: the tokens that an island has sent to
    the expert since it was last averaged. Islands that have sent none are left out; if all have
    sent none, the mean is 0. See docs/experts.md.
    """
    trim: float = Field(default=0.125, gt=0, lt=0.5)
    """For trimmed_mean: fraction of participants removed at each end of every coordinate,
    rounded up. At least one participant remains."""
    max_norm_ratio: float | None = Field(default=None, gt=1)
    """Leave an island's part out of the mean if its norm exceeds this many times the participants'
    median norm. If this and the next two filters would leave a part without participants, the part
    keeps all of them.
    """
    max_norm_zscore: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Leave an island's part out of the mean if its norm is more than this many standard
    deviations above the island's recent norms. EDiT (2412.07210) uses 3. The filter starts with
    the 121st norm; see outer/reduce/norm_zscore.py."""
    min_cosine: float | None = Field(default=None, gt=-1, lt=1)
    """Leave an island's part out of the mean if its cosine with the last committed mean is below
    this value.
    """

    refuse_norm_ratio: float | None = Field(default=20.0, gt=1)
    """Refuse to commit a mean whose norm is more than this many times the norm of what healthy
    islands produce. An island measures by its own current and recent pseudo-gradients. With
    three contributors or more, a contributor whose part is too long is left out of the next
    attempts of the round, unless `rule` withstands it. With two, the log names the other island
    and asks the operator to decide. null: commit any mean. See
    docs/decisions/0057-no-mean-beyond-a-bound.md."""

    @model_validator(mode="after")
    def _options_are_of_own_code(self) -> "MergeConfig":
        if self.options and not is_import_path(self.rule):
            raise ValueError(
                f"options are for a rule of your own by import path, but rule is {self.rule}; "
                "leave them out"
            )
        return self

    @property
    def later_defaults(self) -> set[str]:
        """Settings that were added later and still have their defaults."""
        fields = type(self).model_fields
        found = {"options"} if not self.options else set()
        later = ("refuse_norm_ratio", "experts")
        return found | {name for name in later if getattr(self, name) == fields[name].default}

    @property
    def refuses_payloads(self) -> bool:
        """Whether reducers refuse payloads beyond the bound. They do with rules whose result a
        single participant can move.
        """
        is_movable = self.rule in ("mean", "radial", "contributors") or is_import_path(self.rule)
        return self.refuse_norm_ratio is not None and is_movable

    @property
    def has_filters(self) -> bool:
        """Whether any filter is configured that can leave an island's part out of the mean."""
        return any(
            bound is not None
            for bound in (self.max_norm_ratio, self.max_norm_zscore, self.min_cosine)
        )

    @property
    def remembering(self) -> list[str]:
        """The settings that make a part's mean depend on earlier rounds as its reducer has seen
        them.
        """
        found = [
            name for name in ("max_norm_zscore", "min_cosine") if getattr(self, name) is not None
        ]
        return found + (["rule: centered_clip"] if self.rule == "centered_clip" else [])

    @property
    def needs_last_mean(self) -> bool:
        """Whether every island must keep the last committed mean, which takes 4 bytes per
        parameter.
        """
        return self.rule == "centered_clip" or self.min_cosine is not None


class CodingConfig(Section):
    """Settings of the codecs. Each codec uses the settings that apply to it."""

    options: Options = Field(default_factory=dict)
    """Settings of a codec of your own: keyword arguments of its class or function."""
    feedback: float | None = Field(default=None, ge=0, le=1)
    """Error feedback: factor on the coding error that is added to the next pseudo-gradient.
    null: no error feedback."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """For int4: round to the nearest code, or randomly up or down so that the expected value is
    exact."""
    top_k: int = Field(default=64, ge=1)
    """For topk: number of elements of each chunk that are sent, those with the largest
    magnitudes.
    """
    chunk_elements: int = Field(default=4096, ge=16, le=65536)
    """For topk: number of elements in a chunk. A power of two uses all bits of an index."""
    value_bits: Literal[2, 8, 32] = 2
    """For topk: bits per value sent. 32 sends values unchanged."""
    rank: int = Field(default=32, ge=1)
    """For lowrank: number of columns of the factors that approximate a part as a matrix. If it
    is the matrix's number of rows, the coding is nearly lossless."""


class ExpertSharingConfig(Section):
    """How the experts of a mixture are sent, which are most of its parameters. Other models refuse
    these settings.
    """

    every: int = Field(default=1, ge=1, le=1024)
    """Experts are averaged only in every n-th round of their fragment, with all their changes since
    then. It must divide `outer.rounds`."""
    codec: ExpertCodec | None = None
    """Encoding of the pseudo-gradients of experts. null: `outer.codec`."""
    group: int = Field(default=1, ge=1, le=4096)
    """For merge.experts routed: number of neighbouring experts of a layer that share a weight. A
    fragment has at most 4,096 such groups."""

    @property
    def is_set(self) -> bool:
        """Whether experts are sent otherwise than the rest of the model."""
        return self.every > 1 or self.codec is not None


class GossipConfig(Section):
    """Gossip (NoLoCo, 2506.10911): each island averages with a few others, which are drawn again
    each round. Global params differ between islands.
    """

    group: int = Field(default=2, ge=2)
    """Number of islands that average together. If it does not divide the number of islands, some
    groups are larger.
    """
    momentum: float = Field(default=0.5, ge=0, lt=1)
    """Momentum of the outer step (mu)."""
    lr: float = Field(default=0.7, gt=0)
    """Step size along the group's mean pseudo-gradient (beta)."""
    pull: float = Field(default=0.7, ge=0, le=2)
    """Step size towards the mean of the group's params (gamma)."""
    params: Literal["fp32", "bf16"] = "fp32"
    """Format in which params are sent. Pseudo-gradients use `codec`."""
