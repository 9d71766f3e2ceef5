"""Islands around a loop of Lightning Fabric: a callback. Needs `lightning` or `lightning-fabric`.

islands = IslandsCallback("run.yaml")
fabric = Fabric(callbacks=[islands]); fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
fabric.load(path, {"model": model, ...})                  # if there is something to load
scheduler = islands.follow(LambdaLR(optimizer, warm_up))  # enters the run, and continues at its
                                                          step
for batch in islands.until_over(loader):                  # enters the run
    ...; optimizer.step()                                 # counts; launches and lands rounds
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.schedules import Scheduler, skip_steps
from inner.params import local_tensor

T = TypeVar("T")
S = TypeVar("S", bound=Scheduler)


class IslandsCallback:
    """Makes the processes of a `Fabric` one island of a run, with one model and one optimizer.

    The run is entered after `fabric.setup` and `fabric.load`: by `follow`, by `until_over`, when
    `islands` is read, or in the model's first forward pass.
    """

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
        self._module: nn.Module | None = None
        self._islands: Islands | None = None

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Keep the model that Fabric has set up. The run is entered later, because `fabric.load`
        may follow.
        """
        if self._module is not None and self._islands is None:
            raise ConfigError(
                "IslandsCallback: fabric.setup was called with two models; a run has one model"
            )
        self._module = module
        self._islands = None
        self._first_forward = module.register_forward_pre_hook(lambda *_: self._begin_forward())

    @property
    def islands(self) -> Islands:
        """The islands. Enters the run if that has not been done."""
        if self._islands is None:
            if self._module is None:
                raise ConfigError(
                    "IslandsCallback: call fabric.setup(model, optimizer) before the run is entered"
                )
            self._islands = Islands(
                self._config,
                self._module,
                self._optimizer,
                self._overrides,
                state=self._state,
                buffers=self._buffers,
            )
            self._num_changes = self._count_changes()
        return self._islands

    def _begin_forward(self) -> None:
        """Enter the run. Raises ConfigError if the model has been changed since it was entered."""
        self._first_forward.remove()
        if self._islands is not None and self._count_changes() != self._num_changes:
            self._islands.close("the model was changed after the run was entered")
            raise ConfigError(
                "the model's parameters were changed after the run was entered, and the values of "
                "the run are lost: call fabric.load after fabric.setup, and before follow, "
                "until_over and .islands of IslandsCallback"
            )
        _ = self.islands

    def _count_changes(self) -> int:
        """Return the number of changes that the model's parameters have had in place."""
        assert self._module is not None, "the run is entered after setup"
        return sum(local_tensor(param)._version for param in self._module.parameters())

    def on_after_optimizer_step(self, strategy: Any, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, after the optimizer has made it."""
        expected = self.islands.steps + 1
        self.islands.step(self._tokens)
        if (num_missed := self.islands.steps - expected) > 0:
            for scheduler in self._schedulers:
                skip_steps(scheduler, num_missed, self.islands.steps)

    def follow(self, scheduler: S, steps: int = 0) -> S:
        """Make a schedule continue at the run's step, now and after this island has missed rounds.
        Call it after `setup` and `fabric.load`.

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
        raise ValueError(
            "the loader has no batches left, and the run is not over: give a list or a DataLoader"
        )
