"""Learning-rate schedules of somebody's loop, which follow the steps of the run."""

import logging
import warnings
from typing import Protocol

log = logging.getLogger(__name__)


class Scheduler(Protocol):
    """One of torch.optim.lr_scheduler that counts steps, or a wrapper around it."""

    def step(self) -> None: ...


def skip_steps(scheduler: Scheduler, num_steps: int, run_step: int) -> None:
    """Let a schedule pass over steps of the run that others have made without this island, up to `run_step`.

    One that asks for a metric, as ReduceLROnPlateau does, has no steps to pass over and stays as it is.
    """
    inner = getattr(scheduler, "scheduler", scheduler)  # accelerate's wrapper steps with the optimizer only
    try:
        with warnings.catch_warnings():
            # torch warns of a schedule that steps before its optimizer has.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(num_steps):
                inner.step()
    except TypeError:
        return
    log.info("the learning rate goes on from step %d of the run", run_step)
