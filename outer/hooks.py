"""The phases of a round, and where a fault may be put into them: `diloco simulate --fault` and tests do."""

from typing import Literal, Protocol, get_args

import torch

Phase = Literal[
    "plan",  # the pseudo-gradient is computed; nobody has been told that this island is ready
    "planning",  # the others are told; there is no plan yet
    "send",  # the plan is accepted; no payload has left
    "sending",  # the first payload has left this rank
    "reducing",  # the first mean has come
    "vote",  # the reduce is done here; the vote has not left
    "decide",  # the vote has left; the outcome is not known
    "apply",  # the outcome is commit; nothing has changed yet
    "applied",  # global params have changed; local params have not
    "donate",  # the first part of a state is asked for by a joiner
    "fetch",  # the first part of a state has come from a donor
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Hooks(Protocol):
    """Called inside of a round, on every rank."""

    def reached(self, phase: Phase, round_number: int) -> None:
        """This rank has come to `phase`; on any thread. What it raises is a failure of this rank."""
        ...

    def pseudo_grad(self, round_number: int, values: torch.Tensor) -> torch.Tensor:
        """A part as this island gives it to the others (1-D fp32), from the part as it is."""
        ...

    def payload(self, round_number: int, payload: torch.Tensor) -> torch.Tensor:
        """A payload as it leaves (1-D uint8), from the payload as it is."""
        ...


class NoHooks:
    """Changes nothing."""

    def reached(self, phase: Phase, round_number: int) -> None:
        """Go on."""

    def pseudo_grad(self, round_number: int, values: torch.Tensor) -> torch.Tensor:
        return values

    def payload(self, round_number: int, payload: torch.Tensor) -> torch.Tensor:
        return payload


NO_HOOKS = NoHooks()
