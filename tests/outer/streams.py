"""Support for tests of fragments and delays: islands that stream, and the same run in one
process.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outer.config import OuterConfig, OuterOptimizerConfig
from outer.report import Landing
from outer.space.fragments import build_schedule
from tests.outer.islands import GUARD_SECONDS, FakeParams, Island, Spec, progress

TOKENS = {"a": 100, "b": 300, "c": 57}
"""An inner step's, by island."""
FRAGMENTS = [["layers.0.w", "layers.2.w"], ["layers.1.w"], ["embed", "head"]]
"""Of `layered`, strided, three fragments."""
NESTEROV = OuterOptimizerConfig()


def layered(seed: int = 0, scale: int = 1) -> dict[str, torch.Tensor]:
    """A model of three layers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed": (13, 7),
        "layers.0.w": (6, 5),
        "layers.1.w": (4, 9),
        "layers.2.w": (6, 5),
        "head": (7, 13),
    }
    return {name: torch.randn(a * scale, b, generator=generator) for name, (a, b) in shapes.items()}


def specs() -> list[Spec]:
    return [Spec(name, tuple(values.shape)) for name, values in layered().items()]


def config(num_islands: int, **changes: object) -> OuterConfig:
    fields = {"start_islands": num_islands, "transport": "loopback", "wait_seconds": GUARD_SECONDS}
    return OuterConfig(**{**fields, "rounds": 3, "inner_steps": 7, **changes})


@dataclass
class Stream:
    """An island's life, with fake inner steps: what diloco/island.py does."""

    island: Island
    config: OuterConfig
    made: int = 0
    landings: list[Landing] = field(default_factory=list)

    def run(self, until_round: int) -> None:
        """From round to round; all that were launched have landed."""
        outer = self.island.outer
        while outer.round < until_round:
            self.segment()
            self.launch()
            if self.config.delay == 0 or outer.round == until_round:
                self.land()

    def segment(self) -> None:
        """The inner steps of the coming round; the one on its way lands when its delay is over."""
        outer = self.island.outer
        begin, steps = outer.schedule.begin(outer.round), outer.inner_steps()
        for number in range(1, steps + 1):
            self.island.train(begin + number - 1)
            self.made += TOKENS[self.island.name]
            if outer.in_flight is not None and number >= min(steps, self.config.delay):
                self.land()

    def launch(self) -> None:
        self.island.outer.launch(self.made)
        self.made = 0

    def land(self) -> None:
        self.landings.append(self.island.outer.land())

    def global_params(self) -> torch.Tensor:
        """All of them, in the order of the model."""
        with self.island.outer.global_params():
            return self.island.params.flat()


def streamed(
    config: OuterConfig, rounds: int, island: Island
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """(global params, local params, digests) after so many rounds."""
    island.outer.begin()
    stream = Stream(island, config)
    stream.run(rounds)
    digests = [landing.reports[-1].digest for landing in stream.landings]
    return stream.global_params(), island.params.flat(), digests


class OneProcess:
    """The run as it should be, by the equations: one anchor g for all islands, and every island's
    own params.
    """

    def __init__(
        self, islands: Sequence[str], config: OuterConfig, optimizer: OuterOptimizerConfig
    ) -> None:
        self.names, self.config, self.schedule = list(islands), config, build_schedule(config)
        self.g = {name: FakeParams({name: values}).values[0] for name, values in layered().items()}
        self.local = {island: {n: v.clone() for n, v in self.g.items()} for island in islands}
        self.weight = {island: [0] * config.fragments for island in islands}
        nesterov = optimizer.nesterov and optimizer.momentum > 0
        self._sgd = torch.optim.SGD(
            list(self.g.values()), lr=optimizer.lr, momentum=optimizer.momentum, nesterov=nesterov
        )
        self._on_its_way: dict[str, torch.Tensor] = {}
        self._lands_after = -1

    def run(self, rounds: int) -> None:
        """The first rounds of the schedule."""
        sent = 0
        for step in range(self.schedule.end(rounds - 1) + self.config.delay):
            if step < self.schedule.end(rounds - 1):
                self._train(step)
            if step + 1 == self._lands_after:
                self._land()
            if sent < rounds and step + 1 == self.schedule.end(sent):
                self._send(sent)
                sent += 1
                self._lands_after = step + 1 + self.config.delay
                if self.config.delay == 0 or sent == rounds:
                    self._land()

    def _train(self, step: int) -> None:
        for island in self.names:
            for name, values in self.local[island].items():
                values.add_(progress(island, step, name, values))
            self.weight[island] = [w + TOKENS[island] for w in self.weight[island]]

    def _send(self, round_number: int) -> None:
        fragment = round_number % self.config.fragments
        total = sum(self.weight[island][fragment] for island in self.names)
        names = FRAGMENTS[fragment] if self.config.fragments > 1 else list(self.g)
        self._on_its_way = {name: torch.zeros_like(self.g[name]) for name in names}
        for island in self.names:
            weight = torch.tensor(self.weight[island][fragment] / total)
            for name, mean in self._on_its_way.items():
                mean += (self.g[name] - self.local[island][name]) * weight
            self.weight[island][fragment] = 0

    def _land(self) -> None:
        for name, mean in self._on_its_way.items():
            self.g[name].grad = mean
        self._sgd.step()
        self._sgd.zero_grad()
        mix = self.config.mix
        for local in self.local.values():
            for name in self._on_its_way:
                local[name].copy_(
                    self.g[name] * (1 - mix) + local[name] * mix if mix else self.g[name]
                )
        self._on_its_way = {}

    def flat_global(self) -> torch.Tensor:
        return torch.cat([values.flatten() for values in self.g.values()])

    def flat_local(self, island: str) -> torch.Tensor:
        return torch.cat([values.flatten() for values in self.local[island].values()])
