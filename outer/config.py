"""The outer loop's part of the run config. No torch here."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OuterOptimizerConfig(BaseModel):
    """torch.optim.SGD on fp32 global params; the defaults are DiLoCo's (2311.08105)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(default=0.7, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = True


class MergeConfig(BaseModel):
    """How the participants' pseudo-gradients become one, and which of them are let in; part by part."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: Literal["mean", "trimmed_mean", "geometric_median", "centered_clip", "radial"] = "mean"
    """trimmed_mean, geometric_median and centered_clip stand a few poisoned islands, from three islands on.

    radial: radial-directional averaging (2604.21428), meant for eight islands and more; against drift, not poison.
    """
    trim: float = Field(default=0.125, gt=0, lt=0.5)
    """trimmed_mean: the share of participants left out at each end of every coordinate, rounded up; some stay."""
    max_norm_ratio: float | None = Field(default=None, gt=1)
    """A part whose norm is over so many times the participants' median is left out of that part's mean.

    A part that the gates (this and min_cosine) would leave without participants keeps all of them.
    """
    min_cosine: float | None = Field(default=None, gt=-1, lt=1)
    """A part whose cosine with the last committed mean is below this is left out of that part's mean."""

    @property
    def has_gates(self) -> bool:
        return self.max_norm_ratio is not None or self.min_cosine is not None

    @property
    def needs_last_mean(self) -> bool:
        """Whether the last committed mean has to be kept: 4 bytes a parameter on every island."""
        return self.rule == "centered_clip" or self.min_cosine is not None


class OuterConfig(BaseModel):
    """When islands average, how a pseudo-gradient is coded, and who must be there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int = Field(default=100, ge=1)
    inner_steps: int = Field(default=30, ge=1)
    local_steps: Literal["fixed", "dynamic"] = "fixed"
    """dynamic: a slower island makes fewer inner steps of a round, in proportion to its measured speed."""
    optimizer: OuterOptimizerConfig = OuterOptimizerConfig()
    merge: MergeConfig = MergeConfig()
    codec: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    transport: Literal["loopback", "gloo", "hivemind"] = "hivemind"
    part_elements: int = Field(default=262144, ge=256)
    """Largest part, in parameters; the same on every island, so that codec blocks never depend on a mesh."""
    quorum: int = Field(default=1, ge=1)
    """Fewest participants for a round to count."""
    below_quorum: Literal["wait", "continue", "stop"] = "wait"
    """With fewer: wait until they come, go on with a warning in every round, or end this island."""
    missed_progress: Literal["rebase", "drop"] = "rebase"
    """Of an island that missed one commit: put on top of the state it takes, or given up. After more: given up."""
    start_islands: int = Field(default=1, ge=1)
    """Islands that must have come before the first round is planned."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for other islands before anything has been measured; afterwards deadlines are derived."""
