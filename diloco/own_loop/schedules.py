"""Make learning-rate schedules of the user's own loop follow the steps of the run."""

import logging
import warnings
from typing import Protocol

log = logging.getLogger(__name__)


class Scheduler(Protocol):
    """A scheduler of torch.optim.lr_scheduler that counts steps, or a wrapper around it."""

    def step(self) -> None: ...


def skip_steps(scheduler: Scheduler, num_steps: int, run_step: int) -> None:
    """Advance a schedule over steps that other islands have made without this one, up to step
    `run_step` of the run.

    A schedule that needs a metric, such as ReduceLROnPlateau, is not changed, because it cannot be
    advanced without one.
    """
    inner = getattr(
        scheduler, "scheduler", scheduler
    )  # accelerate's wrapper steps only together with the optimizer
    try:
        with warnings.catch_warnings():
            # torch warns about a schedule that steps before its optimizer.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(num_steps):
                inner.step()
    except TypeError:
        return
    log.info("the learning rate continues from step %d of the run", run_step)
