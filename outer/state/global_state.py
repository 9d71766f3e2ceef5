"""The global params and outer momentum of the parts a rank carries: stepped, digested, served to joiners.

Parts are independent under the outer optimizer, so each may be served, and brought up to date, by itself. A part of the
inner optimizer's moments is sent as it is and becomes the mean: it has no outer momentum.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from pydantic import Field

from outer.account import Account
from outer.codecs.checks import is_finite
from outer.config import OuterOptimizerConfig
from outer.digest import part_digest
from outer.errors import MessageError
from outer.optim import OuterOptimizer
from outer.rounds import MAX_ROUND, Message, parse

LOG_BYTES_PER_PARAM = 8
"""Of committed means, kept for joiners. Beyond the size of a state, taking a part anew costs no more."""
GIVEN_BYTES = 2
"""Before an encoded mean: how many islands gave to it."""
MAX_GIVEN = 1 << 16


class Position(Message):
    """Where a run stands after its last commit. A joiner continues from here."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    """Rounds committed."""
    tokens: int = Field(ge=0, lt=1 << 62)
    """Tokens that all committed pseudo-gradients were trained on."""
    account: Account = Account()
    """Of the data; left out where a part's position is told."""


class PartHeader(Message):
    """What stands before a part's params and momentum."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    tokens: int = Field(ge=0, lt=1 << 62)
    pushes: int = Field(default=0, ge=0, lt=MAX_GIVEN)


@dataclass(frozen=True)
class PartState:
    """One part's global params and outer momentum, fp32, after so many committed rounds."""

    params: torch.Tensor
    """Or moments."""
    momentum: torch.Tensor
    """Empty of moments."""
    round: int
    pushes: int = 0
    """Of Delayed Nesterov, since momentum moved the part."""

    @property
    def digest(self) -> bytes:
        """Of all that the next outer step follows from."""
        pushes = [torch.tensor([float(self.pushes)])] if self.pushes else []
        return part_digest(torch.cat([self.params, self.momentum, *pushes]))

    @property
    def num_bytes(self) -> int:
        return self.params.nbytes + self.momentum.nbytes


class GlobalState:
    """Changes only by `commit` and `replace`, whole, under a lock: peers never read half of a step."""

    def __init__(
        self,
        parts: Mapping[int, torch.Tensor],
        config: OuterOptimizerConfig,
        num_islands: int = 1,
        moments: Collection[int] = (),
    ) -> None:
        """`num_islands`: what Delayed Nesterov counts to; `moments`: which of the parts are not params."""
        self.parts = dict(parts)
        self._moments = frozenset(moments)
        self.position = Position(round=0, tokens=0)
        self._config = config
        self.num_replaced = 0
        """Times that `replace` was called: what came before is another history."""
        self._log: deque[tuple[int, int, dict[int, torch.Tensor]]] = deque()
        """(r, islands that gave, by part the encoded mean that led from round r to r + 1), up to the last commit."""
        params = {i: v for i, v in self.parts.items() if i not in self._moments}
        self._optimizer = OuterOptimizer(params, config, num_islands)
        self._digests: dict[int, bytes] = {}
        """Of parts that have not changed since."""
        self._bases: dict[int, torch.Tensor] = {}
        """Of parts that were committed while local params went on from what they were before: that."""
        self._lock = threading.Lock()

    def pseudo_grads(self, local: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Global minus local, in fp32, of the parts in `local`; descend it. Of moments, the local ones themselves.

        Global: as local params went on from it. A difference of second moments, coded, could bring one to zero or
        below; a mean of them cannot.
        """
        with self._lock:
            return {i: v if i in self._moments else self._base(i) - v for i, v in local.items()}

    def locals_of(self, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The local params that have these pseudo-gradients now; the local moments."""
        return {i: grad if i in self._moments else self.parts[i] - grad for i, grad in pseudo_grads.items()}

    def carried_over(self, local: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """These parts of the local params as they go on from the global params of now, their progress kept."""
        with self._lock:
            bases = {i: self._bases.pop(i, self.parts[i]) for i in local}
            return {i: values + (self.parts[i] - bases[i]) for i, values in local.items()}

    def taken_over(self, parts: Iterable[int]) -> dict[int, torch.Tensor]:
        """Copies of these parts, for local params that go on from them without progress of their own."""
        with self._lock:
            for i in parts:
                self._bases.pop(i, None)
            return {i: self.parts[i].clone() for i in parts}

    def copies(self) -> dict[int, torch.Tensor]:
        """All parts as they are now; `parts` itself may be stepped while it is read."""
        with self._lock:
            return {i: values.clone() for i, values in self.parts.items()}

    def commit(
        self,
        mean_pseudo_grads: Mapping[int, torch.Tensor],
        position: Position,
        payloads: Mapping[int, torch.Tensor] | None = None,
        num_given: int = 1,
        keeps_bases: bool = False,
    ) -> None:
        """One outer step of these parts, all or a fragment's: the only place where global params change in a round.

        `payloads` are the bytes (1-D uint8) that every participant decoded the means from, kept for joiners; do not
        write to them. None: joiners cannot be brought over this round, and take parts anew. `num_given`: islands that
        each is the mean of. `keeps_bases`: local params still go on from these parts as they were, see `carried_over`.
        """
        with self._lock:
            if keeps_bases:
                self._bases |= {i: self.parts[i].clone() for i in mean_pseudo_grads if i not in self._bases}
            params = {i: mean for i, mean in mean_pseudo_grads.items() if i not in self._moments}
            self._optimizer.step(params, num_given)
            for index in self._moments & mean_pseudo_grads.keys():
                self.parts[index].copy_(mean_pseudo_grads[index])
            self._forget_digests(mean_pseudo_grads)
            self._remember(position.round - 1, num_given, payloads)
            self.position = position

    def after(self, index: int, mean: torch.Tensor) -> torch.Tensor:
        """A carried part's global params (no moments) as `commit` would make them of this mean; nothing changes."""
        state = PartState(self.parts[index], self._optimizer.momentum(index), self.position.round)
        return advance(state, mean, self._config).params

    def replace(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Continue from another island's state."""
        with self._lock:
            for index, state in parts.items():
                self.parts[index].copy_(state.params)
                if index not in self._moments:
                    self._optimizer.set_momentum(index, state.momentum, state.pushes)
            self._forget_digests(parts)
            self._log.clear()
            self._bases.clear()
            self.num_replaced += 1
            self.position = position

    @property
    def momentum(self) -> dict[int, torch.Tensor]:
        """The outer optimizer's of each carried part, itself; empty when it has none."""
        of_params = self.parts.keys() - self._moments if self._config.momentum > 0 else ()
        return {i: self._optimizer.momentum(i) for i in of_params}

    @property
    def pushes(self) -> dict[int, int]:
        """Of each carried part, see PartState; empty unless the optimizer is delayed."""
        return {i: self._optimizer.pushes(i) for i in self.parts} if self._config.delayed else {}

    def digests(self) -> dict[int, bytes]:
        """Of each carried part: params and momentum."""
        for i in self.parts.keys() - self._digests.keys():
            self._digests[i] = self._state(i).digest
        return dict(self._digests)

    def pack(self, index: int) -> bytes:
        """A carried part for a joiner: one line of JSON (PartHeader), then params and momentum, raw fp32."""
        self._check_carried(index)
        with self._lock:
            state, position = self._state(index), self.position
            header = PartHeader(round=position.round, tokens=position.tokens, pushes=state.pushes)
            line = header.model_dump_json(exclude_defaults=True).encode() + b"\n"
            return b"".join((line, raw_bytes(state.params), raw_bytes(state.momentum)))

    def mean(self, index: int, round_number: int) -> bytes | None:
        """The mean that led a carried part from this round to the next, see `unpack_mean`; None: no longer kept.

        Raises MessageError for a part of another fragment than the round's: nothing has changed it.
        """
        self._check_carried(index)
        with self._lock:
            found = next(((given, means) for number, given, means in self._log if number == round_number), None)
        if found is None:
            return None
        num_given, payloads = found
        if index not in payloads:
            raise MessageError(f"part {index} was not in round {round_number}")
        return num_given.to_bytes(GIVEN_BYTES, "little") + raw_bytes(payloads[index])

    def _base(self, index: int) -> torch.Tensor:
        """What local params of the part went on from."""
        return self._bases.get(index, self.parts[index])

    def _state(self, index: int) -> PartState:
        """A carried part as it is: the tensors themselves."""
        if index in self._moments:
            return PartState(self.parts[index], torch.empty(0), self.position.round)
        momentum, pushes = self._optimizer.momentum(index), self._optimizer.pushes(index)
        return PartState(self.parts[index], momentum, self.position.round, pushes)

    def _remember(self, round_number: int, num_given: int, payloads: Mapping[int, torch.Tensor] | None) -> None:
        if payloads is None or (self._log and self._log[-1][0] != round_number - 1):
            self._log.clear()
        if payloads is None:
            return
        self._log.append((round_number, num_given, dict(payloads)))
        limit = LOG_BYTES_PER_PARAM * sum(values.numel() for values in self.parts.values())
        while sum(p.numel() for _, _, means in self._log for p in means.values()) > limit:
            self._log.popleft()

    def _forget_digests(self, parts: Iterable[int]) -> None:
        for index in parts:
            self._digests.pop(index, None)

    def _check_carried(self, index: int) -> None:
        if index not in self.parts:
            raise MessageError(f"part {index} is not carried by this rank")


def unpack(body: bytes, num_elements: int, *, has_momentum: bool = True) -> tuple[Position, PartState]:
    """The part in a donor's bytes. Raises MessageError when they are malformed, of another size or not finite."""
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
    """(islands that gave, the encoded mean) in a donor's bytes. Raises MessageError when nobody gave."""
    num_given = int.from_bytes(body[:GIVEN_BYTES], "little")
    if len(body) < GIVEN_BYTES or num_given == 0:
        raise MessageError("a mean that no island gave to")
    return num_given, body[GIVEN_BYTES:]


def state_bytes(num_elements: int, *, has_momentum: bool) -> int:
    """Of a part: params and, unless it is of moments, momentum, fp32."""
    return (8 if has_momentum else 4) * num_elements


def part_of(raw: bytes, num_elements: int, round_number: int, pushes: int = 0) -> PartState:
    """Params and momentum from their raw fp32, one behind the other. Raises MessageError when one is not finite."""
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
    """The part one round later, bit-equal to what `GlobalState.commit` makes of it. `state` is left alone.

    `mean` None: the round did not send it, and only its number changes. `config` None: it is of moments.
    `num_given`, `num_islands`: as there.
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
