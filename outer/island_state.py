"""The global state of one island as a whole: parts spread over its ranks, in step with the local params."""

from collections.abc import Callable, Mapping

import torch

from outer.config import OuterConfig
from outer.digest import combine
from outer.exchange import Exchange, Params
from outer.reduce import Mean
from outer.space import Space
from outer.state import GlobalState, PartState, Position
from outer.team import Team


class IslandState:
    """Built, and each method called, by every rank of the island in the same order."""

    def __init__(self, config: OuterConfig, block_elements: int, params: Params, team: Team) -> None:
        self._team = team
        self.space = Space(params.specs, config.part_elements, block_elements)
        self.exchange = Exchange(self.space, params, team)
        self.mine = GlobalState(self.exchange.gather(), config.optimizer)
        """What this rank carries."""
        self.digest = self.combine(self.mine.digests())
        """Of global params and outer momentum, over all ranks; changes by `commit` and `replace`."""

    def pseudo_grads(self) -> tuple[dict[int, torch.Tensor], float]:
        """This rank's parts of the pseudo-gradient (fp32), and the norm of the whole."""
        grads = self.mine.pseudo_grads(self.exchange.gather())
        square = sum(float(grad.double().square().sum()) for grad in grads.values())
        return grads, sum(self._team.gather(square)) ** 0.5

    def commit(self, means: Mapping[int, Mean], position: Position, between: Callable[[], None]) -> None:
        """One outer step, then `between`, then local params become the global params."""
        values = {index: mean.values for index, mean in means.items()}
        self.mine.commit(values, position, {index: mean.payload for index, mean in means.items()})
        between()
        self._write_back()

    def replace(self, parts: Mapping[int, PartState], position: Position) -> None:
        """Another island's state, in place of global state and local params."""
        self.mine.replace(parts, position)
        self._write_back()

    def rebase(self, pseudo_grads: Mapping[int, torch.Tensor]) -> None:
        """Local params become global params minus these parts: progress made on an earlier state, put on this one."""
        self.exchange.scatter({i: self.mine.parts[i] - grad for i, grad in pseudo_grads.items()})

    def combine(self, digests_by_part: dict[int, bytes]) -> str:
        """One digest of all ranks' parts, in part order."""
        merged = {i: digest for digests in self._team.gather(digests_by_part) for i, digest in digests.items()}
        return combine([merged[part.index] for part in self.space.parts])

    def _write_back(self) -> None:
        self.exchange.scatter(self.mine.parts)
        self.digest = self.combine(self.mine.digests())
