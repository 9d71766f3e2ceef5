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


class Position(Message):
    """Where a run stands after its last commit. A joiner continues from here."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    """Rounds committed."""
    tokens: int = Field(ge=0, lt=1 << 62)
    """Tokens that all committed pseudo-gradients were trained on."""
    account: Account = Account()
    """Of the data; left out where a part's position is told."""


@dataclass(frozen=True)
class PartState:
    """One part's global params and outer momentum, fp32, after so many committed rounds."""

    params: torch.Tensor
    """Or moments."""
    momentum: torch.Tensor
    """Empty of moments."""
    round: int

    @property
    def num_bytes(self) -> int:
        return self.params.nbytes + self.momentum.nbytes


class GlobalState:
    """Changes only by `commit` and `replace`, whole, under a lock: peers never read half of a step."""

    def __init__(
        self, parts: Mapping[int, torch.Tensor], config: OuterOptimizerConfig, moments: Collection[int] = ()
    ) -> None:
        """`moments`: which of the parts are not params."""
        self.parts = dict(parts)
        self._moments = frozenset(moments)
        self.position = Position(round=0, tokens=0)
        self._config = config
        self.num_replaced = 0
        """Times that `replace` was called: what came before is another history."""
        self._log: deque[tuple[int, dict[int, torch.Tensor]]] = deque()
        """(r, by part the encoded mean that led from round r to r + 1), without gaps up to the last commit."""
        self._optimizer = OuterOptimizer({i: v for i, v in self.parts.items() if i not in self._moments}, config)
        self._digests: dict[int, bytes] = {}
        """Of parts that have not changed since."""
        self._lock = threading.Lock()

    def pseudo_grads(self, local: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Global minus local, in fp32, of the parts in `local`; descend it. Of moments, the local ones themselves.

        A difference of second moments, coded, could bring one to zero or below; a mean of them cannot.
        """
        return {i: values if i in self._moments else self.parts[i] - values for i, values in local.items()}

    def locals_of(self, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The local params that have these pseudo-gradients now; the local moments."""
        return {i: grad if i in self._moments else self.parts[i] - grad for i, grad in pseudo_grads.items()}

    def commit(
        self,
        mean_pseudo_grads: Mapping[int, torch.Tensor],
        position: Position,
        payloads: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """One outer step of these parts, all or a fragment's: the only place where global params change in a round.

        `payloads` are the bytes (1-D uint8) that every participant decoded the means from, kept for joiners; do not
        write to them. None: joiners cannot be brought over this round, and take parts anew.
        """
        with self._lock:
            self._optimizer.step({i: mean for i, mean in mean_pseudo_grads.items() if i not in self._moments})
            for index in self._moments & mean_pseudo_grads.keys():
                self.parts[index].copy_(mean_pseudo_grads[index])
            self._forget_digests(mean_pseudo_grads)
            self._remember(position.round - 1, payloads)
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
                    self._optimizer.set_momentum(index, state.momentum)
            self._forget_digests(parts)
            self._log.clear()
            self.num_replaced += 1
            self.position = position

    @property
    def momentum(self) -> dict[int, torch.Tensor]:
        """The outer optimizer's of each carried part, itself; empty when it has none."""
        of_params = self.parts.keys() - self._moments if self._config.momentum > 0 else ()
        return {i: self._optimizer.momentum(i) for i in of_params}

    def digests(self) -> dict[int, bytes]:
        """Of each carried part: params and momentum."""
        for i in self.parts.keys() - self._digests.keys():
            self._digests[i] = part_digest(torch.cat([self.parts[i], self._momentum(i)]))
        return dict(self._digests)

    def pack(self, index: int) -> bytes:
        """A carried part for a joiner: one line of JSON with the position, then params and momentum, raw fp32."""
        self._check_carried(index)
        with self._lock:
            header = self.position.model_dump_json(exclude={"account"}).encode() + b"\n"
            return b"".join((header, raw_bytes(self.parts[index]), raw_bytes(self._momentum(index))))

    def mean(self, index: int, round_number: int) -> bytes | None:
        """The encoded mean that led a carried part from this round to the next; None: it is no longer kept.

        Raises MessageError for a part of another fragment than the round's: nothing has changed it.
        """
        self._check_carried(index)
        with self._lock:
            payloads = dict(self._log).get(round_number)
        if payloads is not None and index not in payloads:
            raise MessageError(f"part {index} was not in round {round_number}")
        return None if payloads is None else raw_bytes(payloads[index])

    def _momentum(self, index: int) -> torch.Tensor:
        return torch.empty(0) if index in self._moments else self._optimizer.momentum(index)

    def _remember(self, round_number: int, payloads: Mapping[int, torch.Tensor] | None) -> None:
        if payloads is None or (self._log and self._log[-1][0] != round_number - 1):
            self._log.clear()
        if payloads is None:
            return
        self._log.append((round_number, dict(payloads)))
        limit = LOG_BYTES_PER_PARAM * sum(values.numel() for values in self.parts.values())
        while sum(p.numel() for _, means in self._log for p in means.values()) > limit:
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
        position = parse(Position, header)
    except MessageError:
        raise MessageError("a part's state without a position") from None
    return position, part_of(raw, num_elements, position.round)


def state_bytes(num_elements: int, *, has_momentum: bool) -> int:
    """Of a part: params and, unless it is of moments, momentum, fp32."""
    return (8 if has_momentum else 4) * num_elements


def part_of(raw: bytes, num_elements: int, round_number: int) -> PartState:
    """Params and momentum from their raw fp32, one behind the other. Raises MessageError when one is not finite."""
    values = torch.frombuffer(bytearray(raw), dtype=torch.float32) if raw else torch.empty(0)
    if not is_finite(values):
        raise MessageError("a part's state with non-finite values")
    return PartState(values[:num_elements], values[num_elements:], round_number)


def advance(state: PartState, mean: torch.Tensor | None, config: OuterOptimizerConfig | None) -> PartState:
    """The part one round later, bit-equal to what `GlobalState.commit` makes of it. `state` is left alone.

    `mean` None: the round did not send it, and only its number changes. `config` None: it is of moments.
    """
    if mean is None:
        return replace(state, round=state.round + 1)
    if config is None:
        return replace(state, params=mean, round=state.round + 1)
    params = state.params.clone()
    optimizer = OuterOptimizer({0: params}, config)
    optimizer.set_momentum(0, state.momentum)
    optimizer.step({0: mean})
    return PartState(params, optimizer.momentum(0), state.round + 1)


def raw_bytes(values: torch.Tensor) -> bytes:
    """The bytes of a CPU tensor, copied."""
    return values.numpy().tobytes()
