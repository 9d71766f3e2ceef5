"""Global params and outer momentum of the parts that one rank carries: stepped, digested and served
to joiners.

The outer optimizer treats parts independently, so each part can be served and brought up to date on
its own. A part of the inner optimizer's moments or of buffers is averaged unchanged: the mean
replaces it, and it has no outer momentum.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import torch

from outer.config import OuterOptimizerConfig
from outer.errors import MessageError
from outer.state.optimizer import OuterOptimizer
from outer.state.part_state import (
    GIVEN_BYTES,
    PartHeader,
    PartState,
    Position,
    advance,
    digest_after,
    raw_bytes,
)

LOG_BYTES_PER_PARAM = 8
"""Limit in bytes per parameter for the committed means kept for joiners. Beyond the size of a
state, downloading a part again is as cheap."""


class GlobalState:
    """Global params and outer momentum of one rank's parts. Only `commit` and `replace` change
    them, under a lock, so that peers never read half of a step.
    """

    def __init__(
        self,
        parts: Mapping[int, torch.Tensor],
        config: OuterOptimizerConfig,
        num_islands: int = 1,
        replaced: Collection[int] = (),
        own: Collection[int] = (),
    ) -> None:
        """Create the state. `num_islands` is N of Delayed Nesterov; `replaced` are the indices of
        parts that their mean replaces; `own` are those among them that are this island's own.
        """
        self.parts = dict(parts)
        self._replaced = frozenset(replaced)
        self._own = frozenset(own)
        self.position = Position(round=0, tokens=0)
        self._config = config
        self.num_replaced = 0
        """Number of calls of `replace`, each of which begins another history."""
        self._log: deque[tuple[int, int, dict[int, torch.Tensor]]] = deque()
        """(r, number of contributors, encoded means by part) for each step from round r to r +
        1.
        """
        params = {i: v for i, v in self.parts.items() if i not in self._replaced}
        self._optimizer = OuterOptimizer(params, config, num_islands)
        self._digests: dict[int, bytes] = {}
        """Digests of the parts that have not changed since they were computed."""
        self._bases: dict[int, torch.Tensor] = {}
        """Earlier values of parts that were committed while this island observed: its local
        params still start from them."""
        self._lock = threading.Lock()

    def pseudo_grads(self, local: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return global minus local params, fp32, of the parts in `local`; for moments and buffers
        the local values themselves.

        `local` is overwritten. The global values are those from which the local params were
        trained. Moments and buffers are sent whole, because a difference could bring a second
        moment or a variance to zero or below, which a mean of them cannot.
        """
        with self._lock:
            return {
                i: v if i in self._replaced else torch.sub(self._base(i), v, out=v)
                for i, v in local.items()
            }

    def local_values(self, pseudo_grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the local params that have these pseudo-gradients relative to the current
        global params; moments are unchanged.
        """
        return {
            i: grad if i in self._replaced else self.parts[i] - grad
            for i, grad in pseudo_grads.items()
        }

    def carry_over(self, local: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return these local values moved to the current global params, with their progress."""
        with self._lock:
            bases = {i: self._bases.pop(i, self.parts[i]) for i in local}
            return {i: values + (self.parts[i] - bases[i]) for i, values in local.items()}

    def take_over(self, parts: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return copies of these parts, for local params that continue from them without
        progress of their own.
        """
        with self._lock:
            for i in parts:
                self._bases.pop(i, None)
            return {i: self.parts[i].clone() for i in parts}

    def copies(self) -> dict[int, torch.Tensor]:
        """Return copies of all parts, because `parts` itself may be stepped while it is read."""
        with self._lock:
            return {i: values.clone() for i, values in self.parts.items()}

    def states(self) -> dict[int, PartState]:
        """Return all parts in the form that a joiner gets: the tensors themselves, valid until
        the next `commit`.
        """
        with self._lock:
            return {i: self._state(i) for i in self.parts}

    def commit(
        self,
        mean_pseudo_grads: Mapping[int, torch.Tensor],
        position: Position,
        payloads: Mapping[int, torch.Tensor] | None = None,
        num_given: int = 1,
        keeps_bases: bool = False,
        digests: Mapping[int, bytes] | None = None,
    ) -> None:
        """Make one outer step of these parts. Only this method changes global params in a round.

        `payloads` are the bytes (1-D uint8) from which every participant decoded the means. They
        are kept for joiners and must not be changed. Without them (None) joiners cannot follow this
        step and download parts again. `num_given` is the number of islands in each mean.
        `keeps_bases`: local params still start from the old values, see `carry_over`. `digests`:
        results of `digest_after` for these means; None: they are computed when needed.
        """
        with self._lock:
            if keeps_bases:
                self._bases |= {
                    i: self.parts[i].clone() for i in mean_pseudo_grads if i not in self._bases
                }
            params = {i: mean for i, mean in mean_pseudo_grads.items() if i not in self._replaced}
            self._optimizer.step(params, num_given)
            for index in self._replaced & mean_pseudo_grads.keys():
                self.parts[index].copy_(mean_pseudo_grads[index])
            self._forget_digests(mean_pseudo_grads)
            self._digests |= digests or {}
            self._remember(position.round - 1, num_given, payloads)
            self.position = position

    def preview(self, index: int, mean: torch.Tensor) -> torch.Tensor:
        """Return the part's global params after a `commit` of this mean, without committing it.
        Not for parts that their mean replaces.
        """
        state = PartState(self.parts[index], self._optimizer.momentum(index), self.position.round)
        return advance(state, mean, self._config).params

    def replace(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Continue from another island's state."""
        with self._lock:
            for index, state in parts.items():
                self.parts[index].copy_(state.params)
                if index not in self._replaced:
                    self._optimizer.set_momentum(index, state.momentum, state.pushes)
            self._forget_digests(parts)
            self._log.clear()
            self._bases.clear()
            self.num_replaced += 1
            self.position = position

    @property
    def momentum(self) -> dict[int, torch.Tensor]:
        """The outer optimizer's momentum buffers by carried part; empty when it has no momentum."""
        return (
            {i: self._optimizer.momentum(i) for i in self._stepped}
            if self._config.keeps_momentum
            else {}
        )

    @property
    def pushes(self) -> dict[int, int]:
        """`PartState.pushes` by carried part; empty unless the optimizer is delayed."""
        return {i: self._optimizer.pushes(i) for i in self._stepped} if self._config.delayed else {}

    @property
    def _stepped(self) -> list[int]:
        """The parts that the outer optimizer steps."""
        return [i for i in self.parts if i not in self._replaced]

    def digests(self) -> dict[int, bytes]:
        """Return the digest of params and momentum by carried part, without the island's own
        parts.
        """
        for i in self.parts.keys() - self._digests.keys() - self._own:
            self._digests[i] = self._state(i).digest
        return dict(self._digests)

    def show(self, own: Mapping[int, torch.Tensor]) -> None:
        """Offer these values of the island's own parts to joiners from now on."""
        with self._lock:
            for index, values in own.items():
                assert index in self._own, f"part {index} changes by commits only"
                self.parts[index].copy_(values)

    def digest_after(self, index: int, mean: torch.Tensor, num_given: int) -> bytes:
        """Return the part's digest after a `commit` of this mean. Nothing changes. Several threads
        may call it for different parts.

        If the state changes during the call, as after an abandoned attempt, the result is invalid.
        """
        step = None if index in self._replaced else self._optimizer.next_step(index, num_given)
        return digest_after(self._state(index), mean, step)

    def pack(self, index: int) -> bytes:
        """Pack a part for a joiner: one line of JSON (PartHeader), then params and momentum as
        raw fp32.
        """
        self._check_carried(index)
        with self._lock:
            state = self._state(index)
            position = self.position
            header = PartHeader(round=position.round, tokens=position.tokens, pushes=state.pushes)
            line = header.model_dump_json(exclude_defaults=True).encode() + b"\n"
            return b"".join((line, raw_bytes(state.params), raw_bytes(state.momentum)))

    def mean(self, index: int, round_number: int) -> bytes | None:
        """Return the bytes of the mean that led a part from this round to the next (`unpack_mean`);
        None if no longer kept.

        Raises MessageError for a part of another fragment, which the round did not change.
        """
        self._check_carried(index)
        with self._lock:
            found = next(
                ((given, means) for number, given, means in self._log if number == round_number),
                None,
            )
        if found is None:
            return None
        num_given, payloads = found
        if index not in payloads:
            raise MessageError(f"part {index} was not in round {round_number}")
        return num_given.to_bytes(GIVEN_BYTES, "little") + raw_bytes(payloads[index])

    def _base(self, index: int) -> torch.Tensor:
        """Return the global values from which the part's local params were trained."""
        return self._bases.get(index, self.parts[index])

    def _state(self, index: int) -> PartState:
        """Return the part's tensors themselves, not copies."""
        if index in self._replaced:
            return PartState(self.parts[index], torch.empty(0), self.position.round)
        momentum = self._optimizer.momentum(index)
        pushes = self._optimizer.pushes(index)
        return PartState(self.parts[index], momentum, self.position.round, pushes)

    def _remember(
        self, round_number: int, num_given: int, payloads: Mapping[int, torch.Tensor] | None
    ) -> None:
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
