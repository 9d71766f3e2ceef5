"""The outer optimizer's settings."""

from typing import Annotated

from pydantic import Field, model_validator

from outer.config.own_code import Options, one_of
from outer.config.section import Section


class AlignConfig(Section):
    """HeLoCo's rule (2606.00271), part by part: a pseudo-gradient that disagrees with the outer momentum is changed.

    It is for rounds of a quorum, where pseudo-gradients are stale. See outer/state/alignment.py for the equations; the
    defaults are ours.
    """

    keep: float = Field(default=0.0, ge=0, le=1)
    """A pseudo-gradient whose cosine with the momentum is at least this is left alone; 0: all that do not oppose it."""
    turn: float = Field(default=0.5, ge=0)
    """How far one with a cosine from 0 to `keep` is turned towards the momentum, keeping its length; 0: not at all."""
    shrink: float = Field(default=1.0, ge=0)
    """How much of what points against the momentum is taken away; 0: nothing."""
    most: float = Field(default=1.0, ge=0, le=1)
    """Largest share of it that is taken away."""
    doubt: float = Field(default=1.0, ge=0)
    """How much less is done to a pseudo-gradient that is short beside the momentum; 0: no less."""


class OuterOptimizerConfig(Section):
    """torch.optim.SGD on the fp32 global params. The defaults are those of DiLoCo (2311.08105)."""

    rule: Annotated[str, one_of((), "my_package.outer:SignMomentum")] | None = None
    """An outer optimizer of your own by its import path (docs/extending.md), which gets `lr` and `options`; `momentum`
    and `nesterov` do not apply to it. null: SGD."""
    options: Options = Field(default_factory=dict)
    """Settings of an outer optimizer of your own: keyword arguments of its class."""
    lr: float = Field(default=0.7, gt=0)
    """Step size along the mean pseudo-gradient. With momentum 0 and lr 1 the outer step is plain averaging."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Share of the momentum that each step keeps; 0 for none."""
    nesterov: bool = True
    """Whether momentum is Nesterov's, which looks one step ahead."""
    delayed: bool = False
    """Delayed Nesterov (2401.09135): apply each pseudo-gradient at once as one share of `outer.start_islands`, and let
    momentum move the params once that many have come. Rounds of a few islands then do no more than one round of all."""
    align: AlignConfig | None = None
    """HeLoCo's rule (2606.00271) for stale pseudo-gradients; `{}` has its defaults. null: they are left alone."""

    @model_validator(mode="after")
    def _fits(self) -> "OuterOptimizerConfig":
        if self.options and self.rule is None:
            raise ValueError("options are for a rule of your own, and rule is null; leave them out")
        if self.rule is not None and (self.delayed or self.align is not None):
            raise ValueError("delayed and align are of SGD, and rule names an optimizer of your own; leave them out")
        if self.delayed and (self.momentum == 0 or not self.nesterov):
            raise ValueError(
                f"delayed sets when Nesterov momentum moves the params: set momentum above 0 and nesterov to true, or "
                f"delayed to false (momentum is {self.momentum}, nesterov {str(self.nesterov).lower()})"
            )
        if self.align is not None and self.momentum == 0:
            raise ValueError(
                "align compares pseudo-gradients with the momentum, and momentum is 0: set it above 0, or align to null"
            )
        return self

    @property
    def keeps_momentum(self) -> bool:
        """Whether the optimizer keeps an fp32 value per parameter from one step to the next."""
        return self.rule is not None or self.momentum > 0
