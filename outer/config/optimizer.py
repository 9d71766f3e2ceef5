"""The outer optimizer's settings."""

from typing import Annotated

from pydantic import Field, model_validator

from outer.config.own_code import Options, one_of
from outer.config.section import Section


class AlignConfig(Section):
    """HeLoCo's rule (2606.00271), part by part: a pseudo-gradient that disagrees with the outer
    momentum is changed.

    It is meant for rounds of a quorum, where pseudo-gradients are stale. See
    outer/state/alignment.py for the equations. The default values are our own.
    """

    keep: float = Field(default=0.0, ge=0, le=1)
    """A pseudo-gradient whose cosine with the momentum is at least this value is not changed. 0:
    only pseudo-gradients with a negative cosine are changed."""
    turn: float = Field(default=0.5, ge=0)
    """How far a pseudo-gradient with a cosine from 0 to `keep` is turned towards the momentum.
    Its length stays the same. 0: not at all."""
    shrink: float = Field(default=1.0, ge=0)
    """How much of the component against the momentum is removed from a pseudo-gradient; 0:
    nothing."""
    most: float = Field(default=1.0, ge=0, le=1)
    """Largest share of the component against the momentum that is removed."""
    doubt: float = Field(default=1.0, ge=0)
    """How much the changes are reduced for a pseudo-gradient that is short relative to the
    momentum; 0: not at all."""


class OuterOptimizerConfig(Section):
    """torch.optim.SGD on the fp32 global params. The defaults are DiLoCo's (2311.08105)."""

    rule: Annotated[str, one_of((), "my_package.outer:SignMomentum")] | None = None
    """An outer optimizer of your own, by its import path (docs/extending.md). It gets `lr` and
    `options`; `momentum` and `nesterov` do not apply to it. null: SGD."""
    options: Options = Field(default_factory=dict)
    """Settings of an outer optimizer of your own: keyword arguments of its class."""
    lr: float = Field(default=0.7, gt=0)
    """Step size along the mean pseudo-gradient. With momentum 0 and lr 1 the outer step is plain
    averaging.
    """
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Share of the momentum that each step keeps; 0: no momentum."""
    nesterov: bool = True
    """Whether to use Nesterov momentum, which looks one step ahead."""
    delayed: bool = False
    """Delayed Nesterov (2401.09135): apply each pseudo-gradient at once as a share of 1 /
    `outer.start_islands`, and let momentum move the params after every `outer.start_islands`
    pseudo-gradients. Several rounds of a few islands then have the effect of one round of all."""
    align: AlignConfig | None = None
    """HeLoCo's rule (2606.00271) for stale pseudo-gradients; `{}` uses its defaults. null:
    pseudo-gradients are not changed."""

    @model_validator(mode="after")
    def _fits(self) -> "OuterOptimizerConfig":
        if self.options and self.rule is None:
            raise ValueError("options are for a rule of your own, but rule is null; leave them out")
        if self.rule is not None and (self.delayed or self.align is not None):
            raise ValueError(
                "delayed and align belong to SGD, but rule names an optimizer of your own; leave "
                "them out"
            )
        if self.delayed and (self.momentum == 0 or not self.nesterov):
            raise ValueError(
                "delayed sets when Nesterov momentum moves the params: set momentum above 0 and "
                f"nesterov to true, or delayed to false (momentum is {self.momentum}, nesterov "
                f"{str(self.nesterov).lower()})"
            )
        if self.align is not None and self.momentum == 0:
            raise ValueError(
                "align compares pseudo-gradients with the momentum, but momentum is 0: set it "
                "above 0, or align to null"
            )
        return self

    @property
    def later_defaults(self) -> set[str]:
        """Settings that were added later and still have their defaults."""
        return {"rule", "options"} if self.rule is None else set()

    @property
    def keeps_momentum(self) -> bool:
        """Whether the optimizer keeps an fp32 value per parameter from one step to the next."""
        return self.rule is not None or self.momentum > 0
