"""The state of one part: params and momentum, as bytes for a joiner, and one outer step further."""

from dataclasses import dataclass, replace

import torch
from pydantic import AliasChoices, Field

from outer.codecs.packing.checks import is_finite
from outer.config import OuterOptimizerConfig
from outer.errors import MessageError
from outer.leases.ledger import Ledger
from outer.network.messages import MAX_ROUND, Message, parse
from outer.space.digest import part_digest
from outer.state.optimizer import OuterOptimizer

GIVEN_BYTES = 2
"""Size of the number of contributors that stands before an encoded mean."""
MAX_GIVEN = 1 << 16


class Position(Message):
    """Where a run stands after its last commit. A joiner continues from here."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    """Rounds committed."""
    tokens: int = Field(ge=0, lt=1 << 62)
    """Tokens that all committed pseudo-gradients were trained on."""
    ledger: Ledger = Field(default=Ledger(), validation_alias=AliasChoices("ledger", "account"))
    """The ledger of the data, empty in the position of a single part. Older checkpoints call it `account`."""


class PartHeader(Message):
    """The line of JSON before a part's params and momentum."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    tokens: int = Field(ge=0, lt=1 << 62)
    pushes: int = Field(default=0, ge=0, lt=MAX_GIVEN)


@dataclass(frozen=True)
class PartState:
    """One part's global params and outer momentum, fp32, after `round` committed rounds."""

    params: torch.Tensor
    """Moments of the inner optimizer, if the part is one of moments."""
    momentum: torch.Tensor
    """Empty for a part of moments."""
    round: int
    pushes: int = 0
    """Pushes of Delayed Nesterov since the momentum moved the part."""

    @property
    def digest(self) -> bytes:
        """Digest of everything that decides the next outer step."""
        pushes = [torch.tensor([float(self.pushes)])] if self.pushes else []
        return part_digest(self.params, self.momentum, *pushes)

    @property
    def num_bytes(self) -> int:
        return self.params.nbytes + self.momentum.nbytes


def unpack(body: bytes, num_elements: int, *, has_momentum: bool = True) -> tuple[Position, PartState]:
    """Parse a part from a donor's bytes. Raises MessageError if they are malformed, of another size or not finite."""
    header, newline, raw = body.partition(b"\n")
    if not newline or len(raw) != state_bytes(num_elements, has_momentum=has_momentum):
        expected = state_bytes(num_elements, has_momentum=has_momentum)
        raise MessageError(f"a part's state has {len(raw)} bytes, expected {expected}")
    try:
        found = parse(PartHeader, header)
    except MessageError:
        raise MessageError("a part's state without a position") from None
    return Position(round=found.round, tokens=found.tokens), part_of(raw, num_elements, found.round, found.pushes)


def unpack_mean(body: bytes) -> tuple[int, bytes]:
    """(number of contributors, encoded mean) from a donor's bytes. Raises MessageError if there is no contributor."""
    num_given = int.from_bytes(body[:GIVEN_BYTES], "little")
    if len(body) < GIVEN_BYTES or num_given == 0:
        raise MessageError("a mean that no island gave to")
    return num_given, body[GIVEN_BYTES:]


def state_bytes(num_elements: int, *, has_momentum: bool) -> int:
    """Size of a part's params and, unless it holds moments, its momentum, in fp32."""
    return (8 if has_momentum else 4) * num_elements


def part_of(raw: bytes, num_elements: int, round_number: int, pushes: int = 0) -> PartState:
    """Parse params followed by momentum from raw fp32. Raises MessageError if a value is not finite."""
    values = torch.frombuffer(bytearray(raw), dtype=torch.float32) if raw else torch.empty(0)
    if not is_finite(values):
        raise MessageError("a part's state with non-finite values")
    return PartState(values[:num_elements], values[num_elements:], round_number, pushes)


def advance(
    state: PartState,
    mean: torch.Tensor | None,
    config: OuterOptimizerConfig | None,
    num_given: int = 1,
    num_islands: int = 1,
) -> PartState:
    """The part one round later, bit-equal to the result of `GlobalState.commit`. `state` does not change.

    `mean` is None if the round did not send the part: only the round number changes. `config` is None for a part of
    moments. `num_given` and `num_islands` are those of `GlobalState`.
    """
    if mean is None:
        return replace(state, round=state.round + 1)
    if config is None:
        return replace(state, params=mean, round=state.round + 1)
    params = state.params.clone()
    optimizer = OuterOptimizer({0: params}, config, num_islands)
    optimizer.set_momentum(0, state.momentum, state.pushes)
    optimizer.step({0: mean}, num_given)
    return PartState(params, optimizer.momentum(0), state.round + 1, optimizer.pushes(0))


def raw_bytes(values: torch.Tensor) -> bytes:
    """The bytes of a CPU tensor, copied."""
    return values.numpy().tobytes()
