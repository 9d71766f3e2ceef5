"""Islands under Lightning's `Trainer`: a callback. Needs `lightning` or `pytorch_lightning`.

    trainer = Trainer(callbacks=[IslandsCallback("run.yaml", tokens=lambda batch: batch.numel())])
    trainer.fit(model, loader)

The trainer stops when the run is over. Its step and its schedules follow the run, even if the
island returns after an absence. Its checkpoints hold the state of the outer loop.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.trainers.lightning_progress import advance, log_round, logged_loss
from diloco.trainers.run_of_trainer import check_length, check_resumes

# Both packages have a class of this name, and each takes only its own. The loaded one is the
# user's.
if TYPE_CHECKING or "pytorch_lightning" not in sys.modules or "lightning.pytorch" in sys.modules:
    from lightning.pytorch import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]
else:
    from pytorch_lightning import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]

KEY = "islands"
"""Key of a checkpoint with the states of the outer loop, one for each rank."""


class IslandsCallback(Callback):
    """Makes the processes of a `Trainer` one island of a run. Give each island its own data."""

    islands: Islands
    """The islands, created when training begins."""

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        tokens: Callable[[Any], int] | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        """Create the callback. `tokens` returns the number of tokens in a batch of this rank;
        without it each batch counts as one. `config`, `overrides`, `buffers`: as for `Islands`.
        """
        self._config = config
        self._overrides = overrides
        self._buffers = buffers
        self._tokens_of = tokens or (lambda batch: 1)
        self._tokens = 0
        """Tokens of the batches since the last optimizer step."""
        self._counted_step = 0
        """The trainer's `global_step` up to which steps are counted."""
        self._saved: list[dict[str, Any]] | None = None
        self._has_failed = False
        self._evaluation = ExitStack()

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self._saved = checkpoint.get(KEY)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the run, when the checkpoint is loaded. Raises ConfigError before that if the
        trainer resumes without the outer loop's state, or if its limits do not fit the run.
        """
        if hasattr(self, "islands"):
            self.islands.close("the trainer begins again")
        saved, self._saved = self._saved, None
        self._check(trainer, has_state=saved is not None)
        rank = trainer.global_rank
        state = None if saved is None else saved[rank if rank < len(saved) else 0]
        self._has_failed = False
        self.islands = Islands(
            self._config,
            pl_module,
            trainer.optimizers,
            self._overrides,
            state=state,
            buffers=self._buffers,
        )
        self._group: dist.ProcessGroup | None = None
        if trainer.world_size > 1:
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
        self._follow(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step if the optimizer has made one; launch and land rounds."""
        self._tokens += self._tokens_of(batch)
        if trainer.global_step == self._counted_step:
            return  # Gradients accumulate over further batches.
        tokens, self._tokens = self._tokens, 0
        report = self.islands.step(tokens, logged_loss(trainer, outputs))
        self._follow(trainer)
        if report is not None:
            log_round(trainer, report)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the global params into the model while it is validated."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not self.islands.is_over:
            self._evaluation.enter_context(self.islands.global_params())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation.close()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Put the states of all ranks into the checkpoint. A round in flight lands first."""
        if self._has_failed or not hasattr(self, "islands"):
            return
        was_settled = self.islands.is_settled
        state = self.islands.state_dict()
        states = [state] * trainer.world_size
        if self._group is not None:
            dist.gather_object(state, states if trainer.global_rank == 0 else None, 0, self._group)
        checkpoint[KEY] = states
        if not was_settled:
            # Landing has changed the model since Lightning took its state.
            checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()
            checkpoint["optimizer_states"] = [
                trainer.strategy.optimizer_state(each) for each in trainer.optimizers
            ]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the run; checkpoints of the end of training are saved before."""
        self.islands.leave()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the run. Checkpoints that are saved because of the exception have no state of
        it.
        """
        self._has_failed = True
        if hasattr(self, "islands"):
            self._evaluation.close()
            self.islands.close(f"{type(exception).__name__} in the trainer")

    def _check(self, trainer: Trainer, *, has_state: bool) -> None:
        """Raise ConfigError if the trainer's limits do not fit the run, or its checkpoint has no
        state.
        """
        max_steps = None if trainer.max_steps < 0 else trainer.max_steps // len(trainer.optimizers)
        check_length(self._config, self._overrides, max_steps, "Trainer(max_steps=...)")
        if trainer.min_steps or trainer.min_epochs:
            raise ConfigError(
                f"Trainer(min_steps={trainer.min_steps}, min_epochs={trainer.min_epochs}) would "
                "train on after the run is over; leave both out: the run decides when training ends"
            )
        cure = (
            "Call fit with a checkpoint that IslandsCallback has saved, or load the model's "
            "weights and call fit of a "
            "new Trainer without ckpt_path: the island then takes the state of the others"
        )
        check_resumes(has_state=has_state, step=trainer.global_step, cure=cure)

    def _follow(self, trainer: Trainer) -> None:
        """Advance the trainer over steps that the run has made without this island, or stop it."""
        num_made = trainer.global_step // len(trainer.optimizers)
        if self.islands.steps > num_made:
            advance(trainer, num_made, self.islands.steps)
        self._counted_step = trainer.global_step
        trainer.should_stop |= self.islands.is_over
