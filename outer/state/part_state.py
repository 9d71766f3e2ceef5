"""The state of one part: params and momentum, their bytes for a joiner, and the state after one
more outer step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from pydantic import AliasChoices, Field

from outer.codecs.packing.checks import is_finite
from outer.config import OuterOptimizerConfig
from outer.errors import MessageError
from outer.leases.ledger import Ledger
from outer.network.messages import MAX_ROUND, MAX_TOKENS, Message, parse
from outer.space.buffers import BUFFERS
from outer.space.digest import part_digest, stream_digest
from outer.state.optimizer import OuterStep

GIVEN_BYTES = 2
"""Size of the number of contributors in front of an encoded mean."""
MAX_GIVEN = 1 << 16
STRETCH_ELEMENTS = 1 << 16
"""Number of elements that are stepped and hashed at once, so that they stay in a core's cache
between the two."""


class Position(Message):
    """The run's position after its last commit. A joiner continues from it."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    """Rounds committed."""
    tokens: int = Field(ge=0, lt=MAX_TOKENS)
    """Number of tokens in all committed pseudo-gradients."""
    ledger: Ledger = Field(default=Ledger(), validation_alias=AliasChoices("ledger", "account"))
    """The data ledger; empty in the position of a single part. Older checkpoints call it
    `account`."""


class PartHeader(Message):
    """The line of JSON before a part's params and momentum."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    tokens: int = Field(ge=0, lt=MAX_TOKENS)
    pushes: int = Field(default=0, ge=0, lt=MAX_GIVEN)


@dataclass(frozen=True)
class PartState:
    """One part's global params and outer momentum, fp32, after `round` committed rounds."""

    params: torch.Tensor
    """Global params, or the values of a part of moments or buffers."""
    momentum: torch.Tensor
    """Outer momentum. Empty for a part of moments or buffers."""
    round: int
    pushes: int = 0
    """Pushes of Delayed Nesterov since the momentum last moved the part."""

    @property
    def digest(self) -> bytes:
        """Digest of all data that decide the next outer step."""
        return part_digest(self.params, self.momentum, *_hashed_pushes(self.pushes))

    @property
    def num_bytes(self) -> int:
        return self.params.nbytes + self.momentum.nbytes


def unpack(
    body: bytes, num_elements: int, *, has_momentum: bool = True
) -> tuple[Position, PartState]:
    """Parse a part from a donor's bytes. Raises MessageError if they are malformed, of another size
    or not finite.
    """
    header, newline, raw = body.partition(b"\n")
    if not newline or len(raw) != state_bytes(num_elements, has_momentum=has_momentum):
        expected = state_bytes(num_elements, has_momentum=has_momentum)
        raise MessageError(f"a part's state has {len(raw)} bytes, expected {expected}")
    try:
        found = parse(PartHeader, header)
    except MessageError:
        raise MessageError("a part's state without a position") from None
    return Position(round=found.round, tokens=found.tokens), part_of(
        raw, num_elements, found.round, found.pushes
    )


def unpack_mean(body: bytes) -> tuple[int, bytes]:
    """Return (number of contributors, encoded mean) from a donor's bytes. Raises MessageError if
    there is no contributor.
    """
    num_given = int.from_bytes(body[:GIVEN_BYTES], "little")
    if len(body) < GIVEN_BYTES or num_given == 0:
        raise MessageError("a mean without contributors")
    return num_given, body[GIVEN_BYTES:]


def state_bytes(num_elements: int, *, has_momentum: bool) -> int:
    """Return the size in bytes of a part's params and, unless it holds moments, its momentum, in
    fp32.
    """
    return (8 if has_momentum else 4) * num_elements


def part_of(raw: bytes, num_elements: int, round_number: int, pushes: int = 0) -> PartState:
    """Parse params followed by momentum from raw fp32. Raises MessageError if a value is not
    finite.
    """
    values = torch.frombuffer(bytearray(raw), dtype=torch.float32) if raw else torch.empty(0)
    if not is_finite(values):
        raise MessageError("a part's state contains non-finite values")
    return PartState(values[:num_elements], values[num_elements:], round_number, pushes)


def advance(
    state: PartState,
    mean: torch.Tensor | None,
    config: OuterOptimizerConfig | None,
    num_given: int = 1,
    num_islands: int = 1,
) -> PartState:
    """Return the part one round later, bit-equal to the result of `GlobalState.commit`. `state`
    does not change.

    `mean` is None if the round did not send the part: only the round number changes. `config` is
    None for a part of moments or buffers. `num_given` and `num_islands` are as in `GlobalState`.
    """
    if mean is None:
        return replace(state, round=state.round + 1)
    if config is None:
        return replace(state, params=mean, round=state.round + 1)
    params = state.params.clone()
    momentum = state.momentum.clone()
    step = OuterStep(config, num_given, num_islands, state.pushes)
    step.apply(params, momentum, mean, step.blend(momentum, mean))
    return PartState(params, momentum, state.round + 1, step.pushes_after)


def digest_after(state: PartState, mean: torch.Tensor, step: OuterStep | None) -> bytes:
    """Return the part's digest after this step by the mean, or (None) after the mean has replaced
    it. `state` does not change.

    The stepped params never exist as a whole: only the momentum needs memory.
    """
    return part_digest(mean) if step is None else stream_digest(_stepped(state, mean, step))


def _stepped(state: PartState, mean: torch.Tensor, step: OuterStep) -> Iterator[torch.Tensor]:
    """Yield the data for the digest of a stepped part, in order. A tensor is overwritten when
    the next one is requested.
    """
    momentum = BUFFERS.floats(state.momentum.numel()).copy_(state.momentum)
    room = torch.empty(min(STRETCH_ELEMENTS, mean.numel()))
    blend = step.blend(momentum, mean)
    for start in range(0, mean.numel(), STRETCH_ELEMENTS):
        stretch = slice(start, start + STRETCH_ELEMENTS)
        params = room[: mean[stretch].numel()].copy_(state.params[stretch])
        step.apply(params, momentum[stretch], mean[stretch], blend)
        yield params
    yield momentum
    yield from _hashed_pushes(step.pushes_after)


def _hashed_pushes(pushes: int) -> list[torch.Tensor]:
    return [torch.tensor([float(pushes)])] if pushes else []


def raw_bytes(values: torch.Tensor) -> bytes:
    """Return the bytes of a CPU tensor, copied."""
    return values.numpy().tobytes()
