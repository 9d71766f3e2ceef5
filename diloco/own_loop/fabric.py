"""Islands around a loop of Lightning Fabric: a callback. Needs `lightning` or `lightning-fabric`.

islands = IslandsCallback("run.yaml")
fabric = Fabric(callbacks=[islands]); fabric.launch()
model, optimizer = fabric.setup(model, optimizer)         # enters the run
scheduler = islands.follow(LambdaLR(optimizer, warm_up))  # continues at the run's step
for batch in islands.until_over(loader):
    ...; optimizer.step()                                 # counts; launches and lands rounds
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from diloco.own_loop.islands import Islands
from diloco.own_loop.schedules import Scheduler, skip_steps

T = TypeVar("T")
S = TypeVar("S", bound=Scheduler)


class IslandsCallback:
    """Makes the processes of a `Fabric` one island of a run, with one model and one optimizer."""

    islands: Islands
    """The islands, created in `fabric.setup`."""

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        tokens_per_step: int = 1,
        optimizer: torch.optim.Optimizer | None = None,
        state: Mapping[str, Any] | str | Path | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        """Create the callback. `tokens_per_step`: weight of a step on each rank, because Fabric
        does not know its batches.

        `optimizer` is only needed for `outer.moments`. `state`, `buffers`: as for `Islands`.
        """
        self._buffers = buffers
        self._config = config
        self._overrides = overrides
        self._state = state
        self._tokens = tokens_per_step
        self._optimizer = optimizer
        self._schedulers: list[Scheduler] = []

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Enter the run, after Fabric has set up the model."""
        self.islands = Islands(
            self._config, module, self._optimizer, self._overrides, state=self._state, buffers=self._buffers
        )

    def on_after_optimizer_step(self, strategy: Any, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, after the optimizer has made it."""
        expected = self.islands.steps + 1
        self.islands.step(self._tokens)
        if (num_missed := self.islands.steps - expected) > 0:
            for scheduler in self._schedulers:
                skip_steps(scheduler, num_missed, self.islands.steps)

    def follow(self, scheduler: S, steps: int = 0) -> S:
        """Make a schedule continue at the run's step, now and after this island has missed rounds.
        Call it after `setup`.

        `steps`: number of steps that a schedule with loaded state has made already. Your loop calls
        `scheduler.step` as usual.
        """
        skip_steps(scheduler, self.islands.steps - steps, self.islands.steps)
        self._schedulers.append(scheduler)
        return scheduler

    def until_over(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches until the run is over, repeating them if there are too few. Leaves the run
        at the end.
        """
        with self.islands as islands:
            num_before = -1
            number = 0
            while number > num_before:
                num_before = number
                for batch in batches:
                    if islands.is_over:
                        return
                    yield batch
                    number += 1
        raise ValueError("the loader has no batches left, and the run is not over: give a list or a DataLoader")
