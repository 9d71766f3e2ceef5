"""Components of torchtitan's trainer that know of the run: subclasses, which are put into its config."""

from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from outer.report import RoundReport

C = TypeVar("C")


def derive(config: C, mixin: type, **attributes: Any) -> C:
    """Return a copy of a component's config that builds a subclass of the component, with `mixin` in front.

    `attributes` become attributes of the subclass.
    """
    component = type(config)._owner  # pyright: ignore[reportAttributeAccessIssue]

    @dataclass(kw_only=True, slots=True)
    class Config(type(config)):
        pass

    # torchtitan makes the class that has a Config as an attribute what this Config builds.
    type(f"{mixin.__name__}{component.__name__}", (mixin, component), {"Config": Config, **attributes})
    return Config(**{field.name: getattr(config, field.name) for field in fields(config) if field.init})


class Splitting:
    """A data loader that reads this island's part of the text."""

    island: int
    num_islands: int

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, **more: Any) -> None:
        """Streamed text is dealt out one by one, so islands may have different numbers of ranks."""
        size = dp_world_size * self.num_islands
        rank = dp_rank * self.num_islands + self.island % self.num_islands
        super().__init__(config, dp_world_size=size, dp_rank=rank, **more)


class Checkpointing:
    """A checkpointer behind whose loading the trainer enters the run, and that saves the outer loop's state."""

    trainer: Any


    def load(self, step: int = -1) -> bool:
        """Load the checkpoint, and then enter the run, with the state of the outer loop beside it."""
        is_loaded = super().load(step)
        # The step is 0 if there is no checkpoint, or of one the model alone was loaded.
        self.trainer.enter(self._folder(self.trainer.step) if self.trainer.step else None)
        return is_loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Write this rank's state of the outer loop before the trainer reads the model.

        Saving it may land a round in flight, which changes the model.
        """
        islands = self.trainer.islands
        if islands is not None and not islands.is_over and self._should_save(curr_step, last_step):
            islands.save(self._folder(curr_step))
        return super()._save(curr_step, last_step)

    def _folder(self, step: int) -> Path:
        config = self.trainer.config.checkpoint
        own = Path(self.folder, f"step-{step}")
        return own if own.exists() or not config.initial_load_path else Path(config.initial_load_path)


class Validating:
    """A validator that evaluates the global params, which are the same on all islands."""

    trainer: Any

    def validate(self, model_parts: Any, step: int) -> None:
        islands = self.trainer.islands
        with nullcontext() if islands.is_over else islands.global_params():
            super().validate(model_parts, step)


class Recording:
    """A metrics processor that also logs what rounds cost, and keeps the loss for the island's own records."""

    loss: float | None = None
    """The loss that was logged last, until it is taken."""

    def take_loss(self) -> float | None:
        """Return the loss of this step, None if the trainer has not logged it."""
        loss = self.loss
        self.loss = None
        return loss

    def add(self, report: RoundReport) -> None:
        """Count a round that has landed, for the next line of the log."""
        before = getattr(self, "_rounds", {})
        self._rounds = {
            "islands/round": report.round,
            "islands/islands": len(report.participants),
            "islands/sent(MB)": before.get("islands/sent(MB)", 0.0) + report.bytes_sent / 1e6,
            "islands/received(MB)": before.get("islands/received(MB)", 0.0) + report.bytes_received / 1e6,
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
        self.loss = global_avg_loss
        metrics = (extra_metrics or {}) | getattr(self, "_rounds", {})
        self._rounds = {}
        super().log(step, global_avg_loss, global_max_loss, grad_norm, metrics)
