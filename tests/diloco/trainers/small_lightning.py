"""A small model under Lightning's Trainer. Its batches follow from the trainer's step, so resuming
repeats them.
"""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from diloco.trainers.lightning import IslandsCallback
from tests.diloco.own_loop.loops import TOKENS, small_model

WARM_UP = 100


def share(step: int) -> float:
    """Of the learning rate, at a step of the run."""
    return (step + 1) / WARM_UP


class Small(LightningModule):
    """The model of tests under its own names. Records the loss, the step and the learning rate of
    each step.
    """

    def __init__(self, lr: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        for name, module in small_model(seed).named_children():
            self.add_module(name, module)
        self._lr = lr
        self.losses: list[float] = []
        self.seen: list[tuple[int, float]] = []
        self.validated: list[torch.Tensor] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self._lr, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, share), "interval": "step"},
        }

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        seed = self.trainer.global_step * 10 + self.trainer.global_rank
        inputs = torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(seed))
        outputs = inputs
        for module in self.children():
            outputs = module(outputs)
        loss = (outputs.squeeze(1) - inputs.sum(1)).square().mean()
        self.losses.append(loss.item())
        self.seen.append(
            (self.trainer.global_step, self.trainer.optimizers[0].param_groups[0]["lr"])
        )
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(self.first_values())

    def first_values(self) -> torch.Tensor:
        return next(self.parameters()).detach().clone()


LOADER = DataLoader([torch.zeros(1)] * 1000, TOKENS)
QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def alone(folder: Path, **outer: Any) -> dict[str, Any]:
    """The config of a run of one island."""
    rules = {"transport": "loopback", "rounds": 3, "inner_steps": 2, "start_islands": 1}
    return {"name": "run", "outer": rules | outer, "island": {"run_dir": str(folder / "runs")}}


class StopAt(Callback):
    """Ends training at a step, as a user's own callback may."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop |= trainer.global_step == self._step


def fit(
    folder: Path,
    islands: IslandsCallback | None,
    *others: Callback,
    model: Small | None = None,
    **settings: Any,
) -> Small:
    """Train the small model, by default on one process and without loggers and checkpoints."""
    model = model or Small()
    resume = settings.pop("ckpt_path", None)
    options = (
        QUIET
        | {"devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": 100}
        | settings
    )
    callbacks = [*([] if islands is None else [islands]), *others]
    Trainer(default_root_dir=folder, callbacks=callbacks, **options).fit(
        model, LOADER, LOADER, ckpt_path=resume
    )
    return model
