"""Config of the inner optimizer."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from inner.config.section import Section
from inner.foreign.name_pattern import NamePattern
from inner.import_path import Options, is_import_path, one_of


class ParamGroup(Section):
    """Optimizer settings for the parameters whose names match a pattern."""

    pattern: str
    """Regular expression, searched for in the parameter's full name (`layers.0.attention.q_proj.weight`). If several
    groups match, the first is used. `^` and `$` anchor the pattern to the ends of the name. Without flags such as (?i),
    references to groups, and more than three repeats within each other: it may come from a swarm, and must not hang."""
    lr_scale: float = Field(default=1.0, ge=0)
    """Factor on the learning rate; 0 freezes the parameters."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of these parameters. null: the value that they would have without this group."""
    optimizer: Literal["adamw"] | None = None
    """`adamw` beside Muon or an own optimizer: step these parameters with AdamW instead."""

    @field_validator("pattern")
    @classmethod
    def _pattern_is_valid(cls, pattern: str) -> str:
        try:
            NamePattern(pattern)
        except ValueError as error:
            raise ValueError(f"a regular expression ({error}); write \\. for a dot") from None
        return pattern


class AveragingConfig(Section):
    """Generalized primal averaging (2512.17131) of the inner optimizer: a smooth variant of single-island DiLoCo.

    The inner optimizer steps a point z of its own, and x is a slow average of z. The island's params are y, between
    the two: gradients are taken at y, and y is evaluated and sent to other islands.
    """

    x: float = Field(ge=0, lt=1)
    """Decay of x per step. 0.9 ** (1 / inner_steps) resembles DiLoCo with that many inner steps; 0: no averaging."""
    y: float = Field(default=0.7, gt=0, le=1)
    """Share of x in y; the rest is z."""


class SpikeConfig(Section):
    """When a step's loss is a spike, and what is done about it. A spike is noted in the logbook in any case."""

    deviations: float = Field(default=6.0, gt=0)
    """A loss so many standard deviations above the mean of the last `steps` losses is a spike."""
    steps: int = Field(default=50, ge=2, le=10_000)
    """Number of losses before a step that its loss is compared with; until there are so many, nothing is a spike."""
    action: Literal["note", "skip", "rewind"] = "note"
    """`note`: nothing more. `skip`: the step's gradient is thrown away. `rewind`: the same, and the island goes on from
    the global params of the last commit. Moments of the optimizer stay."""


class OptimizerConfig(Section):
    """The inner optimizer, its learning-rate schedule in inner steps, clipping, and the limit on skipped steps."""

    name: Annotated[str, one_of(("adamw", "sgd", "muon"), "my_package.optimizers:Lion")] = "adamw"
    """`adamw`, `sgd`, or `muon`: Muon for the matrices of the blocks and AdamW with the same lr for all other
    parameters. An own optimizer is named by its import path: inner/optim/own_optimizer.py."""
    options: Options = Field(default_factory=dict)
    """Arguments of an own optimizer."""
    lr: float = Field(default=4e-4, gt=0)
    """Peak learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of AdamW's second moments."""
    momentum_weight: float = Field(default=1.0, ge=0, le=1)
    """Share of AdamW's first moment in its step; the rest is the gradient itself (QHAdam, 1810.06801). Below 1, with a
    slow first moment (betas of 0.99 and more), it is the inner optimizer of MT-DAO (2510.05361)."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon for the matrices of the blocks."""
    muon_row_beta: float | None = Field(default=None, ge=0, lt=1)
    """NorMuon (2510.05491): Muon's updates are divided by the root mean square of each of their rows, a running mean
    with this decay (0.95 in the paper). null: Muon as it is."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Share of lr by which a step shrinks matrices. Norms and the embedding do not decay unless a group sets it."""
    groups: tuple[ParamGroup, ...] = ()
    """Settings of their own for some parameters, by patterns on their names."""
    averaging: AveragingConfig | None = None
    """Generalized primal averaging (2512.17131). null: the inner optimizer steps the params directly."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of a step's gradient over all parameters; a larger one is scaled down to it. null never clips."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """Course of the learning rate after the warm-up: `constant`, `cosine` down to min_lr_ratio at the end of the run,
    or `wsd`, constant and then linear down to min_lr_ratio in the last decay_steps."""
    warmup_steps: int = Field(default=100, ge=0)
    """Inner steps in which the learning rate rises linearly to lr."""
    decay_steps: int = Field(default=0, ge=0)
    """For `wsd`: number of steps of the final linear decay."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of lr at which cosine and wsd end."""
    tokens_per_step: int = Field(default=16384, ge=1)
    """Tokens of one inner step of one island, over all of its ranks and micro-batches."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Number of consecutive non-finite steps that are skipped. After one more the island offers to go back to its last
    saved state from before them, or ends."""

    spikes: SpikeConfig = SpikeConfig()
    """Loss spikes."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared logarithm of each position's softmax denominator in what is minimised (PaLM, 2204.02311,
    has 1e-4), which keeps logits from drifting. Reported losses are without it. 0: none."""
    noise_scale_every: int = Field(default=0, ge=0)
    """Inner steps between two measurements of the gradient noise scale (1812.06162), each of which costs one more
    backward pass. 0: never."""

    @model_validator(mode="after")
    def _settings_fit_the_name(self) -> "OptimizerConfig":
        is_own = is_import_path(self.name)
        if self.options and not is_own:
            raise ValueError(f"options are those of an own optimizer, and name is {self.name}; leave options out")
        if self.muon_row_beta is not None and self.name != "muon":
            raise ValueError(f"muon_row_beta is for muon, and name is {self.name}; leave it out, or set name to muon")
        if self.momentum_weight < 1 and self.name != "adamw":
            raise ValueError(
                f"momentum_weight is for adamw, and name is {self.name}; leave it out, or set name to adamw"
            )
        chosen = [group.pattern for group in self.groups if group.optimizer is not None]
        if chosen and self.name != "muon" and not is_own:
            raise ValueError(
                f"group {chosen[0]!r} chooses an optimizer, but name is {self.name}: all parameters have that one; "
                "leave the group's optimizer out, or set name to muon"
            )
        return self
