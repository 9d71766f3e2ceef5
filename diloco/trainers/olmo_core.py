"""Islands under the trainer of OLMo-core: a callback. Needs `ai2-olmo-core`.

    config = TrainerConfig(...).with_callback("islands", IslandsCallback("run.yaml"))

The trainer stops when the run is over. Its step, its tokens and so its schedule follow the run,
even if the island returns after an absence. Its checkpoints hold the state of the outer loop of
each rank.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from olmo_core.distributed.utils import get_rank  # pyright: ignore[reportMissingImports]
from olmo_core.train.callbacks import Callback, EvaluatorCallback  # pyright: ignore[reportMissingImports]
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC  # pyright: ignore[reportMissingImports]

from diloco.own_loop.islands import Islands
from diloco.trainers.run_of_trainer import check_length, check_resumes, round_metrics


@dataclass
class IslandsCallback(Callback):
    """Makes the processes of a trainer one island of a run. Give each island its own data.

    The model may be sharded by FSDP2; pipelines and experts have not been tried.
    """

    priority: ClassVar[int] = 2
    """Before the callback that saves checkpoints, so that a checkpoint holds the step that it
    counts.
    """
    config: str | Path | dict[str, Any] = "run.yaml"
    overrides: list[str] = field(default_factory=list)
    buffers: dict[str, str] | None = None
    """These three are the arguments of `Islands`."""

    def __post_init__(self) -> None:
        self._saved: dict[str, Any] = {}
        self._has_failed = False
        self._is_trained = False
        """Whether the trainer trains in this step; it may skip steps."""
        self._tokens = 0
        self._evaluation = ExitStack()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state of the outer loop. A round in flight lands first."""
        return self.islands.state_dict() if self._has_entered and not self._has_failed else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def pre_train(self) -> None:
        """Enter the run, when the checkpoint is loaded. Raises ConfigError before that if the
        trainer resumes without the outer loop's state, or ends before the run.
        """
        trainer = self.trainer
        cure = (
            "Use a checkpoint that the trainer has saved with this callback, or load one with "
            "load_trainer_state=False into an empty save_folder: the island then takes the state "
            "of the others"
        )
        check_length(self.config, self.overrides, trainer.max_steps, "max_duration")
        check_resumes(has_state=bool(self._saved), step=trainer.global_step, cure=cure)
        module = trainer.train_module
        parts = getattr(module, "model_parts", None) or getattr(module, "model")  # noqa: B009
        optimizers = getattr(module, "optimizers", None) or getattr(module, "optim")  # noqa: B009
        saved = self._saved or None
        self.islands = Islands(
            self.config, parts, optimizers, self.overrides, state=saved, buffers=self.buffers
        )
        self._saved = {}
        self._follow()

    def pre_step(self, batch: dict[str, Any]) -> None:
        """Note the tokens of the step, of all ranks together."""
        tokens = self.trainer.data_loader.global_num_tokens_in_batch(batch)
        self._tokens = self.trainer.tokens_per_batch if tokens is None else tokens
        self._is_trained = False

    def pre_optim_step(self) -> None:
        self._is_trained = True

    def post_train_batch(self) -> None:
        """Count the step, launch and land rounds."""
        trainer = self.trainer
        is_logged = self.step % trainer.metrics_collect_interval == 0
        loss = trainer.get_metric(TRAIN_CE_LOSS_METRIC) if is_logged else None
        tokens = self._tokens if self._is_trained and get_rank() == 0 else 0
        if report := self.islands.step(tokens, loss):
            for name, value in round_metrics(report).items():
                trainer.record_metric(name, value)
        self._follow()

    def post_step(self) -> None:
        """Put the global params into the model if an evaluation follows, until the next hook."""
        evaluators = [
            each for each in self.trainer.callbacks.values() if isinstance(each, EvaluatorCallback)
        ]
        if any(is_due(each, self.step) for each in evaluators) and not self.islands.is_over:
            self._evaluation.enter_context(self.islands.global_params())

    def pre_load_batch(self) -> None:
        self._evaluation.close()

    def post_epoch(self) -> None:
        self._evaluation.close()

    def post_train(self) -> None:
        self._evaluation.close()

    def on_error(self, exc: BaseException) -> None:
        """Leave the run. A checkpoint that is saved later has no state of it."""
        self._has_failed = True
        if self._has_entered:
            self._evaluation.close()
            self.islands.close(f"{type(exc).__name__} in the trainer")

    def close(self) -> None:
        """Leave the run; the checkpoint of the end of training is saved before."""
        if self._has_entered:
            self.islands.leave()

    @property
    def _has_entered(self) -> bool:
        return hasattr(self, "islands")

    def _follow(self) -> None:
        """Advance the trainer over steps that the run has made without this island, or stop it."""
        trainer = self.trainer
        num_missed = self.islands.steps - trainer.global_step
        if num_missed > 0:
            trainer.global_step += num_missed
            trainer.global_train_tokens_seen += num_missed * trainer.tokens_per_batch
        if self.islands.is_over:
            trainer.cancel_run("the run of its islands is over", no_sync=True)


def is_due(evaluator: EvaluatorCallback, step: int) -> bool:
    """Return whether the evaluator evaluates after this step."""
    is_regular = evaluator.eval_interval is not None and step % evaluator.eval_interval == 0
    return step > 1 and (is_regular or step in (evaluator.fixed_steps or ()))
