"""What can go wrong between islands.

InputError          the user's config or address cannot be used
OuterError
  TransportError    the network: a peer is lost, refused, or sent bytes that fail a check
    PeerLost        the connection to a peer broke, or it cannot be reached
    DeadlineError   a wait ran over its deadline
    MessageError    a peer's bytes are malformed, oversized, or belong to another run or round
      PoisonError   a peer's payload would put inf or nan, or nothing that can be decoded, into a mean
  NonFiniteError    a pseudo-gradient holds inf or nan
  BehindError       others hold the state that survives
  QuorumError       too few islands, and the policy says stop
"""

from collections.abc import Collection


class InputError(ValueError):
    """The user's config or address cannot be used; the text says what, where, got, allowed and the cure."""


class OuterError(RuntimeError):
    """Base of everything a round may fail with."""


class TransportError(OuterError):
    """The network failed; a round that meets it is aborted, training goes on."""


class PeerLost(TransportError):
    """The connection to `peer` (an island's name) broke, or it cannot be reached."""

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(f"island {peer!r} is lost: {cause}")
        self.peer = peer
        self.cause = cause


class DeadlineError(TransportError):
    """A wait ran over its deadline."""


class MessageError(TransportError):
    """A peer's bytes are malformed, oversized, or belong to another run or round."""


class PoisonError(MessageError):
    """The payload of `peer` (an island's name) must not enter a mean; an attempt without that island may succeed."""

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(f"island {peer!r} sent {cause}")
        self.peer = peer


class NonFiniteError(OuterError):
    """A tensor to be encoded holds inf or nan; `index` is the first such element."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(f"element {index} is {value}: a codec takes finite values only")
        self.index = index
        self.value = value


class QuorumError(OuterError):
    """Fewer islands than outer.quorum for longer than the run waits."""


class BehindError(OuterError):
    """Others hold the state that survives; this island must take it from one of `donors`."""

    def __init__(self, donors: Collection[str], cause: str) -> None:
        super().__init__(cause)
        self.donors = tuple(donors)
        self.cause = cause


def first_cause(group: BaseExceptionGroup) -> BaseException:
    """The first error in a group of groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
