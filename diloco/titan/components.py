"""Components of torchtitan's trainer that know of the run, which are put into its config."""

from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torchtitan.components.checkpointer import (  # pyright: ignore[reportMissingImports]
    BaseCheckpointManager,
)
from torchtitan.components.dataloader import BaseDataLoader  # pyright: ignore[reportMissingImports]
from torchtitan.components.metrics import MetricsProcessor  # pyright: ignore[reportMissingImports]
from torchtitan.components.validate import BaseValidator  # pyright: ignore[reportMissingImports]
from torchtitan.config import Configurable  # pyright: ignore[reportMissingImports]

from outer.report import RoundReport


def derive(config: Configurable.Config, mixin: type, **attributes: Any) -> Configurable.Config:
    """Return a copy of a component's config that builds a subclass of the component, with `mixin`
    in front of it and with these attributes.
    """
    component = type(config)._owner  # pyright: ignore[reportAttributeAccessIssue]

    @dataclass(kw_only=True, slots=True)
    class Config(type(config)):
        pass

    # torchtitan makes the class that has a Config as an attribute what this Config builds.
    name = mixin.__name__ + component.__name__
    type(name, (mixin, component), {"Config": Config, **attributes})
    return Config(**{each.name: getattr(config, each.name) for each in fields(config) if each.init})


class Splitting(BaseDataLoader):
    """A data loader that reads one part of the text."""

    part: int
    num_parts: int

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **more: Any) -> None:
        """Streamed text is dealt out one by one, so islands may have different numbers of ranks."""
        size = dp_world_size * self.num_parts
        rank = dp_rank * self.num_parts + self.part
        super().__init__(config, dp_world_size=size, dp_rank=rank, **more)


class Checkpointing(BaseCheckpointManager):
    """A checkpointer that enters the run when it has loaded, and saves the outer loop's state."""

    trainer: Any

    def load(self, step: int = -1) -> bool:
        """Load a checkpoint, and enter the run with the state of the outer loop in it."""
        is_loaded = super().load(step)
        # The step is 0 without a checkpoint, and if the model alone was loaded.
        self.trainer.enter(self._folder(self.trainer.step) if self.trainer.step else None)
        return is_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Write this rank's state of the outer loop before the trainer reads the model.

        Taking the state may land a round in flight, which changes the model.
        """
        islands = self.trainer.islands
        if islands is not None and self._should_save(curr_step, last_step):
            islands.save(self._folder(curr_step))
        return super()._save(curr_step, last_step)

    def _folder(self, step: int) -> Path:
        initial = self.trainer.config.checkpoint.initial_load_path
        own = Path(self.folder, f"step-{step}")
        return own if own.exists() or not initial else Path(initial)


class Validating(BaseValidator):
    """A validator that evaluates the global params, which are the same on all islands."""

    trainer: Any

    def validate(self, model_parts: Any, step: int) -> None:
        islands = self.trainer.islands
        with nullcontext() if islands.is_over else islands.global_params():
            super().validate(model_parts, step)


class Recording(MetricsProcessor):
    """A metrics processor that logs what rounds cost, and keeps the loss for own records."""

    _loss: float | None = None
    _rounds: dict[str, float]

    def __init__(self, *given: Any, **more: Any) -> None:
        self._rounds = {}
        super().__init__(*given, **more)

    def take_loss(self) -> float | None:
        """Return the loss of this step, None if the trainer has not logged it."""
        loss = self._loss
        self._loss = None
        return loss

    def add(self, report: RoundReport) -> None:
        """Count a round that has landed, for the next line of the log."""
        before = self._rounds
        self._rounds = {
            "islands/round": report.round,
            "islands/islands": len(report.participants),
            "islands/sent(MB)": before.get("islands/sent(MB)", 0.0) + report.bytes_sent / 1e6,
            "islands/received(MB)": before.get("islands/received(MB)", 0.0)
            + report.bytes_received / 1e6,
            "islands/wait(s)": before.get("islands/wait(s)", 0.0) + report.wait_seconds,
        }

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        self._loss = global_avg_loss
        metrics = (extra_metrics or {}) | self._rounds
        self._rounds = {}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, metrics)
