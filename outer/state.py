"""The global params and outer momentum of the parts a rank carries: stepped, digested, served to joiners."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field

from outer.config import OuterOptimizerConfig
from outer.digest import part_digest
from outer.errors import MessageError
from outer.optim import OuterOptimizer
from outer.rounds import MAX_ROUND, Message, parse


class Position(Message):
    """Where a run stands after its last commit. A joiner continues from here."""

    round: int = Field(ge=0, lt=MAX_ROUND)
    """Rounds committed."""
    tokens: int = Field(ge=0, lt=1 << 62)
    """Tokens that all committed pseudo-gradients were trained on."""


@dataclass(frozen=True)
class PartState:
    """One part's global params and outer momentum, fp32."""

    params: torch.Tensor
    momentum: torch.Tensor


class GlobalState:
    """Changes only by `commit` and `replace`, whole, under a lock: peers never read half of a step."""

    def __init__(self, parts: Mapping[int, torch.Tensor], config: OuterOptimizerConfig) -> None:
        self.parts = dict(parts)
        self.position = Position(round=0, tokens=0)
        self._optimizer = OuterOptimizer(self.parts, config)
        self._lock = threading.Lock()

    def pseudo_grads(self, local: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Global minus local, in fp32; descend it."""
        return {i: self.parts[i] - local[i] for i in self.parts}

    def commit(self, mean_pseudo_grads: Mapping[int, torch.Tensor], position: Position) -> None:
        """One outer step: the only place where global params change in a round."""
        with self._lock:
            self._optimizer.step(mean_pseudo_grads)
            self.position = position

    def replace(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Continue from another island's state."""
        with self._lock:
            for index, state in parts.items():
                self.parts[index].copy_(state.params)
                self._optimizer.set_momentum(index, state.momentum)
            self.position = position

    def digests(self) -> dict[int, bytes]:
        """Of each carried part: params and momentum."""
        return {i: part_digest(torch.cat([self.parts[i], self._optimizer.momentum(i)])) for i in self.parts}

    def pack(self, index: int) -> bytes:
        """A carried part for a joiner: one line of JSON with the position, then params and momentum, raw fp32."""
        with self._lock:
            if index not in self.parts:
                raise MessageError(f"part {index} is not carried by this rank")
            header = self.position.model_dump_json().encode() + b"\n"
            return header + _raw(self.parts[index]) + _raw(self._optimizer.momentum(index))


def unpack(body: bytes, num_elements: int) -> tuple[Position, PartState]:
    """The part in a donor's bytes. Raises MessageError when they are malformed, of another size or not finite."""
    header, newline, raw = body.partition(b"\n")
    if not newline or len(raw) != 8 * num_elements:
        raise MessageError(f"a part's state has {len(raw)} bytes, expected {8 * num_elements}")
    try:
        position = parse(Position, header)
    except MessageError:
        raise MessageError("a part's state without a position") from None
    values = torch.frombuffer(bytearray(raw), dtype=torch.float32) if raw else torch.empty(0)
    if not torch.isfinite(values).all():
        raise MessageError("a part's state with non-finite values")
    return position, PartState(values[:num_elements], values[num_elements:])


def _raw(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()
