"""Config of the inner optimizer."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from inner.config.experts import BalanceConfig
from inner.config.section import Section
from inner.foreign.name_pattern import NamePattern
from inner.import_path import Options, is_import_path, one_of

LATER = ("balance", "dropout", "state_dtype")
"""Fields of the optimizer's section that were added later."""


class ParamGroup(Section):
    """Optimizer settings for the parameters whose names match a pattern."""

    pattern: str
    """Regular expression that is searched for in the parameter's full name
    (`layers.0.attention.q_proj.weight`). If several groups match, the first is used. `^` and `$`
    anchor the pattern to the ends of the name. Flags such as (?i), references to groups, and more
    than three nested repeats are not allowed, because a config from a swarm must not make an island
    hang."""
    lr_scale: float = Field(default=1.0, ge=0)
    """Factor by which the learning rate is multiplied; 0 freezes the parameters."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of these parameters. null: the value that they would have without this group."""
    optimizer: Literal["adamw"] | None = None
    """Beside Muon or an own optimizer: `adamw` steps these parameters with AdamW instead."""

    @field_validator("pattern")
    @classmethod
    def _pattern_is_valid(cls, pattern: str) -> str:
        try:
            NamePattern(pattern)
        except ValueError as error:
            raise ValueError(f"a regular expression ({error}); write \\. for a dot") from None
        return pattern


class AveragingConfig(Section):
    """Generalized primal averaging (2512.17131) of the inner optimizer: a smooth variant of
    single-island DiLoCo.

    The inner optimizer steps a separate point z, and x is a slow average of z. The island's params
    are y, between x and z: gradients are taken at y, and y is evaluated and sent to other islands.
    """

    x: float = Field(ge=0, lt=1)
    """Decay of x per step. 0.9 ** (1 / inner_steps) resembles DiLoCo with `inner_steps` inner
    steps; 0: no averaging."""
    y: float = Field(default=0.7, gt=0, le=1)
    """Share of x in y; the rest is z."""


class SpikeConfig(Section):
    """When a step's loss is a spike, and what happens then. Every spike is reported in the
    logbook.
    """

    deviations: float = Field(default=6.0, gt=0)
    """A loss is a spike if it is more than this number of standard deviations above the mean of the
    last `steps` losses."""
    steps: int = Field(default=50, ge=2, le=10_000)
    """Number of previous losses that a step's loss is compared with. No loss counts as a spike
    before there are that many."""
    action: Literal["note", "skip", "rewind"] = "note"
    """`note`: only report the spike. `skip`: discard the step's gradient. `rewind`: discard it, and
    continue from the global params of the last commit. The optimizer keeps its moments in any
    case."""


class OptimizerConfig(Section):
    """The inner optimizer, its learning-rate schedule in inner steps, gradient clipping, and the
    limit on skipped steps.
    """

    name: Annotated[str, one_of(("adamw", "sgd", "muon"), "my_package.optimizers:Lion")] = "adamw"
    """`adamw`, `sgd`, or `muon`, which uses Muon for the matrices of the blocks and AdamW with the
    same lr for all other parameters. An own optimizer is given by its import path:
    inner/optim/own_optimizer.py."""
    options: Options = Field(default_factory=dict)
    """Arguments of an own optimizer."""
    lr: float = Field(default=4e-4, gt=0)
    """Peak learning rate, reached at the end of the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the square root of AdamW's second moments."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which AdamW keeps its moments. bfloat16: with stochastic rounding, whose random bits
    follow from the run's seed, the step, and the element, so that they are the same on every mesh.
    It halves the moments' memory. For adamw without momentum_weight and averaging.
    """
    momentum_weight: float = Field(default=1.0, ge=0, le=1)
    """Share of AdamW's first moment in its step; the rest is the gradient itself (QHAdam,
    1810.06801). A value below 1, together with a slow first moment (betas[0] of 0.99 or more),
    gives the inner optimizer of MT-DAO (2510.05361)."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon for the matrices of the blocks."""
    muon_row_beta: float | None = Field(default=None, ge=0, lt=1)
    """NorMuon (2510.05491): each row of Muon's update is divided by the running root mean square of
    that row, which decays by this factor (0.95 in the paper). null: Muon without this division."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Matrices shrink by weight_decay x lr in each step. Norms and the embedding do not decay
    unless a group sets it."""
    groups: tuple[ParamGroup, ...] = ()
    """Groups of parameters with settings that differ from those above, selected by patterns on
    their names."""
    averaging: AveragingConfig | None = None
    """Generalized primal averaging (2512.17131). null: the inner optimizer steps the params
    directly.
    """
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of a step's gradient over all parameters; a gradient with a larger norm is
    scaled down to it. null: never clip."""
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    """Learning rate after the warm-up. `constant`: no change. `cosine`: falls to min_lr_ratio at
    the end of the run. `wsd`: constant, then linear down to min_lr_ratio in the last
    decay_steps."""
    warmup_steps: int = Field(default=100, ge=0)
    """Number of inner steps in which the learning rate rises linearly to lr."""
    decay_steps: int = Field(default=0, ge=0)
    """For `wsd`: number of steps of the final linear decay."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of cosine and wsd, as a share of lr."""
    tokens_per_step: int = Field(default=16384, ge=1)
    """Number of tokens in one inner step of one island, over all of its ranks and micro-batches."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Number of consecutive non-finite steps that are skipped. After one more, the island proposes
    to go back to its last saved state from before these steps, or ends."""

    spikes: SpikeConfig = SpikeConfig()
    """Detection of loss spikes."""
    balance: BalanceConfig = BalanceConfig()
    """Balance of the experts of a mixture. Models without experts do not use it."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the term log(Z)^2 that is added to each position's loss, where Z is the denominator
    of the softmax (PaLM, 2204.02311, uses 1e-4). It keeps logits from drifting. Reported losses do
    not include it. 0: no such term."""
    dropout: float = Field(default=0.0, ge=0, le=0.99)
    """Share of the elements that are set to 0 in training, after the embedding and after each
    attention and feed-forward (1207.0580). The masks are the same on every mesh, and the same on
    all islands for equal numbers of step and sequence. Evaluation has no dropout. Steps of 1/65536;
    0: none.
    """
    noise_scale_every: int = Field(default=0, ge=0)
    """Number of inner steps between two measurements of the gradient noise scale (1812.06162). Each
    measurement costs one more backward pass. 0: never."""

    @property
    def later_defaults(self) -> set[str]:
        """Keys at their defaults that were added later. Hashes leave them out, so that they stay as
        before.
        """
        fields = type(self).model_fields
        return {name for name in LATER if getattr(self, name) == fields[name].default}

    @model_validator(mode="after")
    def _settings_fit_the_name(self) -> "OptimizerConfig":
        is_own = is_import_path(self.name)
        if self.options and not is_own:
            raise ValueError(
                f"options are for an own optimizer only, and name is {self.name}; leave options out"
            )
        if self.muon_row_beta is not None and self.name != "muon":
            raise ValueError(
                f"muon_row_beta is for muon, and name is {self.name}; leave it out, or set name to "
                "muon"
            )
        is_plain = self.name == "adamw" and self.momentum_weight == 1 and self.averaging is None
        if self.state_dtype == "bfloat16" and not is_plain:
            raise ValueError(
                f"state_dtype bfloat16 is for adamw alone, and name is {self.name}, "
                f"momentum_weight {self.momentum_weight:g}, averaging "
                f"{'null' if self.averaging is None else 'set'}; set state_dtype to float32, or "
                "name to adamw, momentum_weight to 1 and averaging to null"
            )
        if self.momentum_weight < 1 and self.name != "adamw":
            raise ValueError(
                f"momentum_weight is for adamw, and name is {self.name}; leave it out, or set name "
                "to adamw"
            )
        chosen = [group.pattern for group in self.groups if group.optimizer is not None]
        if chosen and self.name != "muon" and not is_own:
            raise ValueError(
                f"group {chosen[0]!r} chooses an optimizer, but name is {self.name}, which steps "
                "all parameters; leave the group's optimizer out, or set name to muon"
            )
        return self
