"""The phases of a round, and hooks at which `diloco simulate --fault` and tests inject faults."""

from typing import Literal, Protocol, get_args

import torch

Phase = Literal[
    "plan",  # the pseudo-gradient is computed; no other island knows yet that this one is ready
    "planning",  # the other islands know that this one is ready; there is no plan yet
    "send",  # the plan is accepted; no payload has been sent
    "sending",  # this rank has sent its first payload
    "reducing",  # the first mean has arrived
    "vote",  # the reduce is done here; the vote has not been sent
    "decide",  # the vote has been sent; the outcome is not known
    "apply",  # the outcome is commit; nothing has changed yet
    "applied",  # global params have changed; local params have not
    "donate",  # a joiner has requested the first part of this island's state
    "fetch",  # the first part of a state has arrived from a donor
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Hooks(Protocol):
    """Functions that every rank calls during a round.

    >>> class LogPhases(NoHooks):
    ...     def reached(self, phase: Phase, round_number: int) -> None:
    ...         print(f"round {round_number}: {phase}")
    >>> hooks: Hooks = LogPhases()
    >>> hooks.reached("vote", 3)
    round 3: vote
    """

    def reached(self, phase: Phase, round_number: int) -> None:
        """Handle that this rank reaches `phase`. It is called on any thread. An error that it
        raises is a failure of this rank.
        """

    def pseudo_grad(self, round_number: int, values: torch.Tensor) -> torch.Tensor:
        """Return the part (1-D fp32) to contribute in place of `values`."""
        return values

    def payload(self, round_number: int, payload: torch.Tensor) -> torch.Tensor:
        """Return the payload (1-D uint8) to send in place of `payload`."""
        return payload


class NoHooks(Hooks):
    """Hooks that change nothing."""


NO_HOOKS = NoHooks()
