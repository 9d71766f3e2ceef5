"""The outer loop's part of the run config. No torch here."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class OuterOptimizerConfig(BaseModel):
    """torch.optim.SGD on fp32 global params; the defaults are DiLoCo's (2311.08105)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lr: float = Field(default=0.7, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = True


class OuterConfig(BaseModel):
    """When islands average, how a pseudo-gradient is coded, and who must be there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int = Field(default=100, ge=1)
    inner_steps: int = Field(default=30, ge=1)
    optimizer: OuterOptimizerConfig = OuterOptimizerConfig()
    codec: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    transport: Literal["loopback", "gloo", "hivemind"] = "hivemind"
    part_elements: int = Field(default=262144, ge=256)
    """Largest part, in parameters; the same on every island, so that codec blocks never depend on a mesh."""
    quorum: int = Field(default=1, ge=1)
    """Fewest participants for a round to count; with fewer the run waits."""
    start_islands: int = Field(default=1, ge=1)
    """Islands that must have come before the first round is planned."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for other islands before anything has been measured; afterwards deadlines are derived."""
