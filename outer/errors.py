"""Errors of the communication between islands.

InputError            a mistake of the user
  UnreachableError    none of the swarm's addresses answers
  DifferingConfigsError
OuterError            a failed round
  TransportError      the network; the round is aborted and training continues
    PeerLost
    DeadlineError
      StalledError    a reduce that only one island delays
    MessageError
      PoisonError     a payload that would put inf or nan into a mean
      AuditError      a mean that its reducer cannot account for
  NonFiniteError      a tensor to be encoded holds inf or nan
  BehindError         others hold the state that survives
  QuorumError         too few islands
RankLost              another rank of this island has ended, and with it the island
"""

import re
from collections.abc import Collection

_OF_COLLECTIVES = re.compile(
    r"gloo/transport|\bgloo\b.*onnection|NCCL|ProcessGroup|TCPStore|Connection reset by peer"
)
"""Texts in the errors of torch.distributed that mean that a process at the other end has ended."""

MAX_LISTED = 8


def list_some(causes: Collection[str]) -> str:
    """Return the first MAX_LISTED causes on one line, and the number of the others: a run may have
    a thousand islands.

    >>> list_some([f"island-{number}: no answer" for number in range(10)])[-42:]
    'island-7: no answer; and of 2 more islands'
    """
    more = [f"and of {len(causes) - MAX_LISTED} more islands"] if len(causes) > MAX_LISTED else []
    return "; ".join([*list(causes)[:MAX_LISTED], *more])


class InputError(ValueError):
    """The user's config or address cannot be used. The text states what, where, got, allowed and
    the cure.
    """


class UnreachableError(InputError):
    """None of the addresses of the swarm answers: they are wrong, or no island is there yet, or
    all islands have ended.
    """


class DifferingConfigsError(InputError):
    """The swarm has several configs of one run, and it cannot be decided which of them is the
    run's.
    """


class OuterError(RuntimeError):
    """Base class of the errors of failed rounds."""


class TransportError(OuterError):
    """The network failed: a peer is lost, refused, or sent bad bytes. The round is aborted, and
    training continues.
    """


class PeerLost(TransportError):
    """The connection to `peer` (an island's name) broke, or the peer cannot be reached."""

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(f"island {peer!r} is lost: {cause}")
        self.peer = peer
        self.cause = cause


class DeadlineError(TransportError):
    """A wait exceeded its deadline."""


class StalledError(DeadlineError):
    """A reduce did not end in time, and only the payloads of island `peer` are missing.

    `of_means`: only means that it reduces are missing, for which it may itself be waiting for other
    islands.
    """

    def __init__(self, peer: str, limit_seconds: float, *, of_means: bool) -> None:
        what = "means of island" if of_means else "island"
        super().__init__(
            f"the reduce took longer than {limit_seconds:.0f} s, and waits only for {what} {peer!r}"
        )
        self.peer = peer
        self.of_means = of_means


class MessageError(TransportError):
    """A peer's bytes are malformed, oversized, or belong to another run or round."""


class PoisonError(MessageError):
    """A payload of island `peer` must not enter a mean: it does not decode, or makes inf or nan. A
    retry may work.
    """

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(f"island {peer!r} sent {cause}")
        self.peer = peer


class AuditError(MessageError):
    """Island `peer` cannot account for the mean of a part that it reduced."""

    def __init__(self, peer: str, cause: str, *, is_wrong: bool) -> None:
        """Create the error. `is_wrong`: the mean is not the mean of the payloads. Otherwise the
        island did not show the payloads.
        """
        super().__init__(cause)
        self.peer = peer
        self.is_wrong = is_wrong


class NonFiniteError(OuterError):
    """A tensor to be encoded contains inf or nan. `index` is the index of the first such
    element.
    """

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"element {index} is {value}: a codec takes finite values only")
        self.index = index
        self.value = value


class QuorumError(OuterError):
    """There were fewer islands than outer.quorum for longer than the run waits."""


class BehindError(OuterError):
    """Other islands hold the state that survives. This island must download it from one of
    `donors`.
    """

    def __init__(self, donors: Collection[str], cause: str) -> None:
        super().__init__(cause)
        self.donors = tuple(donors)
        self.cause = cause


class RankLost(RuntimeError):
    """Another rank of this island has ended. Its launcher starts all of them again."""


def name_lost_rank(error: BaseException) -> BaseException:
    """Return a RankLost if an error of torch.distributed means that a rank of the island has
    ended, otherwise the error itself.
    """
    if isinstance(error, RankLost | OuterError) or not isinstance(error, RuntimeError):
        return error
    if not _OF_COLLECTIVES.search(str(error)):
        return error
    return RankLost(
        f"another rank of this island has ended, so this one ends, too ({first_line(error)})"
    )


def is_about_run_key(cause: str) -> bool:
    """Return whether an error's text reports differing run keys, which a retry cannot cure."""
    return "run key" in cause


def first_line(error: BaseException) -> str:
    """Return one line about an error: the cause of a PeerLost, the error's first line, or the
    name of its type.
    """
    text = error.cause if isinstance(error, PeerLost) else str(error)
    return (text or type(error).__name__).splitlines()[0][:300]


def first_cause(group: BaseExceptionGroup) -> BaseException:
    """Return the first error in an exception group, however deeply it is nested."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
