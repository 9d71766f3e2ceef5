"""The outer loop's part of the run config. No torch here."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

MOMENT_RULES = ("mean", "trimmed_mean", "geometric_median")
"""Whose result lies between what the participants send, as a second moment must."""
GATHERED = frozenset({"topk"})
"""Codecs of whose payloads a mean is not one of their own values: everybody gets all, and makes the mean itself."""


class OuterOptimizerConfig(BaseModel):
    """torch.optim.SGD on fp32 global params; the defaults are DiLoCo's (2311.08105)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: float = Field(default=0.7, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = True
    delayed: bool = False
    """Delayed Nesterov (2401.09135): each pseudo-gradient counts at once as one of `outer.start_islands`, and momentum
    moves the params when as many have come. Rounds of a few islands then do no more than one round of all."""

    @model_validator(mode="after")
    def _fits(self) -> "OuterOptimizerConfig":
        if self.delayed and (self.momentum == 0 or not self.nesterov):
            raise ValueError(
                f"delayed is when Nesterov momentum moves the params: set momentum above 0 and nesterov to true, or "
                f"delayed to false (momentum is {self.momentum}, nesterov {str(self.nesterov).lower()})"
            )
        return self


class MergeConfig(BaseModel):
    """How the participants' pseudo-gradients become one, and which of them are let in; part by part."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: Literal["mean", "trimmed_mean", "geometric_median", "centered_clip", "radial", "contributors"] = "mean"
    """trimmed_mean, geometric_median and centered_clip stand a few poisoned islands, from three islands on.

    radial: radial-directional averaging (2604.21428), meant for eight islands and more; against drift, not poison.
    contributors: of each element the mean of those who sent it, for codecs that send few.
    """
    trim: float = Field(default=0.125, gt=0, lt=0.5)
    """trimmed_mean: the share of participants left out at each end of every coordinate, rounded up; some stay."""
    max_norm_ratio: float | None = Field(default=None, gt=1)
    """A part whose norm is over so many times the participants' median is left out of that part's mean.

    A part that the gates (this and the next two) would leave without participants keeps all of them.
    """
    max_norm_zscore: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """A part whose norm is over so many standard deviations above its participant's own of late is left out; 3 is
    EDiT's (2412.07210). From the 121st norm on; outer/anomalies.py says how it is counted."""
    min_cosine: float | None = Field(default=None, gt=-1, lt=1)
    """A part whose cosine with the last committed mean is below this is left out of that part's mean."""

    @property
    def has_gates(self) -> bool:
        return any(bound is not None for bound in (self.max_norm_ratio, self.max_norm_zscore, self.min_cosine))

    @property
    def needs_last_mean(self) -> bool:
        """Whether the last committed mean has to be kept: 4 bytes a parameter on every island."""
        return self.rule == "centered_clip" or self.min_cosine is not None


class CodingConfig(BaseModel):
    """How the codec works; each codec reads what concerns it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    feedback: float | None = Field(default=None, ge=0, le=1)
    """Error feedback: what coding lost is kept, times this, and added to the next pseudo-gradient; null: none."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """int4: to the nearest code, or up or down by chance so that the expected value is exact."""
    top_k: int = Field(default=64, ge=1)
    """topk: elements of each chunk that are sent; the largest magnitudes."""
    chunk_elements: int = Field(default=4096, ge=16, le=65536)
    """topk: elements among which the largest are found; a power of two makes the most of an index's bits."""
    value_bits: Literal[2, 8, 32] = 2
    """topk: of each value that is sent; 32 sends it as it is."""
    rank: int = Field(default=32, ge=1)
    """lowrank: columns of the two factors that a part, seen as a matrix, is sent as; all rows: all but lossless."""


class GossipConfig(BaseModel):
    """Each round an island averages with a few others, chosen anew; there is no model of all (NoLoCo, 2506.10911)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    group: int = Field(default=2, ge=2)
    """Islands that average together; where these do not divide all islands evenly, some groups have more."""
    momentum: float = Field(default=0.5, ge=0, lt=1)
    """mu: of the outer step."""
    lr: float = Field(default=0.7, gt=0)
    """beta: how far an island goes along the group's mean progress."""
    pull: float = Field(default=0.7, ge=0, le=2)
    """gamma: how far it goes towards the mean of the group's params."""
    params: Literal["fp32", "bf16"] = "fp32"
    """How params travel; pseudo-gradients go through `codec`."""


GOSSIP_REFUSES = (
    "wait_for",
    "fragments",
    "delay",
    "mix",
    "eager",
    "local_steps",
    "optimizer",
    "moments",
    "merge",
    "quorum",
    "below_quorum",
    "missed_progress",
)
"""Settings of rounds that all islands make together."""


class OuterConfig(BaseModel):
    """When islands average, how a pseudo-gradient is coded, and who must be there."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rounds: int = Field(default=100, ge=1)
    """Times that every parameter is averaged: rounds x inner_steps inner steps in all."""
    inner_steps: int = Field(default=30, ge=1)
    fragments: int = Field(default=1, ge=1)
    """Sets of parameters that are averaged in turn, each once in `inner_steps`, at its own offset (2501.18512)."""
    fragment_pattern: Literal["strided", "sequential", "balanced"] = "strided"
    """Which layers a fragment has: every so many, neighbours, or such that all fragments are about as large."""
    delay: int = Field(default=0, ge=0)
    """Inner steps for which a round runs behind the training, before its result is merged: tau of 2501.18512."""
    mix: float = Field(default=0.0, ge=0, le=1)
    """Share of an island's own params in what it goes on from after a round: alpha of 2501.18512."""
    eager: bool = False
    """While a round is on its way, go on from what this island's own share of it will change (2502.12996)."""
    moments: tuple[PositiveInt, PositiveInt] | None = None
    """[u, v]: every u-th time that params are averaged the inner AdamW's first moments are, too, every v-th its second.

    [3, 6] is DES-LOC's (2505.22549), [1, 1] Local Adam; null: never. Sent in fp32 when `codec` is fp32, else in bf16.
    """
    local_steps: Literal["fixed", "dynamic", "timed"] = "fixed"
    """dynamic: a slower island makes fewer inner steps of a round, in proportion to its measured speed.

    timed: as many as it can in `round_seconds` (A-EDiT, 2412.07210), at least one, and at most those of the schedule:
    `inner_steps` (of a fragment its share of them), by which the learning rate and the length of the run go.
    """
    round_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """timed: how long an island makes inner steps for a round, from the first on; waiting for others is not counted."""
    optimizer: OuterOptimizerConfig = OuterOptimizerConfig()
    merge: MergeConfig = MergeConfig()
    gossip: GossipConfig | None = None
    """Average with a few islands in turn, not with all; null: rounds of all islands."""
    codec: Literal["fp32", "bf16", "fp16", "int8", "int4", "e3m0", "stat2", "topk", "lowrank"] = "fp32"
    coding: CodingConfig = CodingConfig()
    transport: Literal["loopback", "gloo", "hivemind"] = "hivemind"
    part_elements: int = Field(default=262144, ge=256)
    """Largest part, in parameters; the same on every island, so that codec blocks never depend on a mesh."""
    quorum: int = Field(default=1, ge=1)
    """Fewest participants for a round to count; with `wait_for: quorum`, fewest that give to it."""
    wait_for: Literal["all", "quorum"] = "all"
    """quorum: a round waits for so many islands; the others listen: they train on, give nothing, and get its result."""
    below_quorum: Literal["wait", "continue", "stop"] = "wait"
    """With fewer: wait until they come, go on with a warning in every round, or end this island."""
    missed_progress: Literal["rebase", "drop"] = "rebase"
    """Of an island that missed one commit: put on top of the state it takes, or given up. After more: given up."""
    start_islands: int = Field(default=1, ge=1)
    """Islands that must have come before the first round is planned."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for other islands before anything has been measured; afterwards deadlines are derived."""

    @model_validator(mode="after")
    def _fits(self) -> "OuterConfig":
        if self.fragments > self.inner_steps:
            raise ValueError(
                f"fragments is {self.fragments}, inner_steps {self.inner_steps}: each fragment is sent at a step of "
                "its own; lower fragments or raise inner_steps"
            )
        between = self.inner_steps // self.fragments
        if self.delay > between:
            raise ValueError(
                f"delay is {self.delay}, but there are only {between} inner steps (inner_steps / fragments) from one "
                f"round to the next, and one is on its way at a time; set delay to {between} or less"
            )
        if self.eager and (self.delay == 0 or self.mix > 0):
            raise ValueError(
                f"eager is for rounds that run behind the training and are not mixed: set delay to 1 or more and mix "
                f"to 0 (delay is {self.delay}, mix {self.mix})"
            )
        if self.eager and self.optimizer.delayed:
            raise ValueError("eager looks ahead to an outer step of all islands, optimizer.delayed makes it in shares")
        self._check_quorum()
        self._check_gossip()
        self._check_timed()
        self._check_histories()
        return self._moments_fit()

    def _moments_fit(self) -> "OuterConfig":
        if self.moments is None:
            return self
        if self.eager:
            raise ValueError(
                "moments are not sent by eager rounds: there is no outer step on an island's own share of them; set "
                "eager to false or moments to null"
            )
        if self.wait_for == "quorum":
            raise ValueError(
                "moments are averaged by rounds of all islands: a listener's own steps are not put on top of an "
                "average; set wait_for to all or moments to null"
            )
        if self.optimizer.delayed:
            raise ValueError(
                "moments are averaged at once, optimizer.delayed counts what comes as shares; set optimizer.delayed to "
                "false or moments to null"
            )
        if self.merge.rule not in MOMENT_RULES:
            raise ValueError(
                f"moments cannot be merged by {self.merge.rule}, which is about pseudo-gradients; set merge.rule to "
                f"{', '.join(MOMENT_RULES[:-1])} or {MOMENT_RULES[-1]}, or moments to null"
            )
        return self

    def _check_gossip(self) -> None:
        if self.gossip is None:
            return
        fields = type(self).model_fields
        found = [name for name in GOSSIP_REFUSES if getattr(self, name) != fields[name].default]
        found += ["coding.feedback"] if self.coding.feedback is not None else []
        if found:
            raise ValueError(
                f"gossip has no rounds of all islands, and a momentum and lr of its own: leave out {', '.join(found)}, "
                "or set gossip to null"
            )

    def _check_quorum(self) -> None:
        if self.wait_for == "quorum" and (self.delay > 0 or self.mix > 0):
            raise ValueError(
                f"wait_for is 'quorum': islands that are not waited for train on during a round, and those that give "
                f"to it wait for it; set delay and mix to 0, or wait_for to all (delay is {self.delay}, mix {self.mix})"
            )

    def _check_timed(self) -> None:
        if (self.local_steps == "timed") != (self.round_seconds is not None):
            raise ValueError(
                f"local_steps 'timed' and round_seconds go together: set both or neither (local_steps is "
                f"{self.local_steps!r}, round_seconds {self.round_seconds})"
            )
        if self.local_steps == "timed" and self.wait_for == "quorum":
            raise ValueError(
                "wait_for is 'quorum': islands give when their inner steps are done, each in its own time; set "
                "local_steps to dynamic and leave out round_seconds, or wait_for to all"
            )

    def _check_histories(self) -> None:
        merge = self.merge
        remembering = [name for name in ("max_norm_zscore", "min_cosine") if getattr(merge, name) is not None]
        remembering += ["rule: centered_clip"] if merge.rule == "centered_clip" else []
        if remembering and self.codec in GATHERED:
            raise ValueError(
                f"merge.{remembering[0]}: with codec {self.codec} every island makes the means itself, and one that "
                "has joined remembers other rounds than the others; leave it out (max_norm_ratio remembers nothing), "
                "or use another codec"
            )

    @property
    def num_rounds(self) -> int:
        """Rounds of the protocol, each of one fragment."""
        return self.rounds * self.fragments

    @property
    def is_plain(self) -> bool:
        """Whether local params equal the global params after every round."""
        return self.fragments == 1 and self.delay == 0 and self.mix == 0 and self.wait_for == "all"
