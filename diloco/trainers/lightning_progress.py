"""The progress of Lightning's `Trainer`: its steps, schedules, losses and metrics. Needs
Lightning.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from diloco.own_loop.schedules import skip_steps
from diloco.trainers.run_of_trainer import round_metrics
from outer.report import RoundReport

if TYPE_CHECKING:
    from lightning.pytorch import Trainer  # pyright: ignore[reportMissingImports]

log = logging.getLogger(__name__)


def advance(trainer: "Trainer", num_made: int, steps: int) -> None:
    """Set a trainer that has made `num_made` steps to step `steps` of the run, and its schedules
    too.
    """
    loop = trainer.fit_loop.epoch_loop
    is_automatic = trainer.lightning_module.automatic_optimization
    progress = (
        loop.automatic_optimization.optim_progress.optimizer.step
        if is_automatic
        else loop.manual_optimization.optim_step_progress
    )
    num_missed = (steps - num_made) * len(trainer.optimizers)
    progress.total.ready += num_missed
    progress.total.completed += num_missed
    loop._batches_that_stepped += steps - num_made
    for schedule in trainer.lr_scheduler_configs:
        if schedule.interval == "step":
            num_calls = steps // schedule.frequency - num_made // schedule.frequency
            skip_steps(schedule.scheduler, num_calls, steps)
        else:
            log.warning(
                "a schedule by epochs stays where it is, although the run has gone on: use "
                "interval='step'"
            )


def logged_loss(trainer: "Trainer", outputs: Any) -> torch.Tensor | None:
    """Return the loss of a step that Lightning logs, None in other steps: reading it waits for the
    GPU.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if trainer.global_step % max(trainer.log_every_n_steps, 1) or not isinstance(
        loss, torch.Tensor
    ):
        return None
    return loss * trainer.accumulate_grad_batches


def log_round(trainer: "Trainer", report: RoundReport) -> None:
    """Give the metrics of a round to the trainer's loggers and callbacks."""
    metrics = round_metrics(report)
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
