"""Islands around Hugging Face's `Trainer`, and so around TRL's trainers: a callback. Needs
`transformers`.

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[IslandsCallback("run.yaml")])
    trainer.train()

The trainer stops when the run is over, or after its own max_steps; set max_steps to at least
outer.rounds x inner_steps. Its step and its schedule follow the run, even if the island returns
after an absence.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.saved_state import state_path, write_state
from diloco.own_loop.schedules import Scheduler, skip_steps


class IslandsCallback(TrainerCallback):
    """Makes the processes of a `Trainer` one island of a run.

    The weight of an island is the number of tokens that it trained on if
    `include_num_input_tokens_seen` is set in the training arguments, else the number of examples.
    Choose the same on all islands. Give each island its own dataset.
    """

    islands: Islands
    """The islands, created when training begins."""

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        overrides: Sequence[str] = (),
        *,
        state: str | Path | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        """Create the callback. `state`: the checkpoint from which the trainer resumes, if it is not
        checkpoint-STEP in its output folder. The other arguments are those of `Islands`.
        """
        self._state = state
        self._config = config
        self._buffers = buffers
        self._overrides = overrides
        self._tokens_before = 0
        self._saved: tuple[int, dict[str, Any]] = -1, {}
        """The trainer's step at which the state of the outer loop was taken, and this state."""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Scheduler | None = None,
        **_: Any,
    ) -> None:
        """Enter the run. If the trainer resumes from a checkpoint, use the outer loop's state in
        it.

        Raises ConfigError on every rank if the checkpoint has none, rather than begin a new run.
        """
        assert model is not None, "a trainer has a model"
        if hasattr(self, "islands"):
            self.islands.close(
                "the trainer begins again"
            )  # An exception may have ended it, which no callback reports.
        saved = (self._state or saved_path(args, state).parent) if state.global_step else None
        self.islands = Islands(
            self._config, model, optimizer, self._overrides, state=saved, buffers=self._buffers
        )
        self._tokens_before = int(state.num_input_tokens_seen)
        self._saved = (-1, {})
        self._follow(state, lr_scheduler)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: Scheduler | None = None,
        **_: Any,
    ) -> None:
        """Count the step, launch and land rounds."""
        self.islands.step(self._count(args, state))
        self._follow(state, lr_scheduler)
        if self.islands.is_over:
            control.should_training_stop = True
        self._collect(args, state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._collect(args, state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._collect(args, state, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write this rank's state of the outer loop beside the trainer's state. Raises ConfigError
        if it is too late.
        """
        saved = self._saved[1] if self._is_collected(state) else self._collect_late(state)
        write_state(saved, saved_path(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.islands.leave()

    def _follow(self, state: TrainerState, lr_scheduler: Scheduler | None) -> None:
        """Advance the trainer's step and its schedule over steps that the run has made without this
        island.
        """
        num_missed = self.islands.steps - state.global_step
        if num_missed > 0:
            state.global_step = self.islands.steps
            if lr_scheduler is not None:
                skip_steps(lr_scheduler, num_missed, self.islands.steps)

    def _collect(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> None:
        """Take the state before the trainer saves the model, because this lands a round in flight,
        which changes the model.

        The trainer decides in its evaluation whether a model is the best and is saved. So the
        landed model is evaluated.
        """
        may_be_best = control.should_evaluate and args.save_strategy == "best"
        if (control.should_save or may_be_best) and not self._is_collected(state):
            self._saved = state.global_step, self.islands.state_dict()

    def _is_collected(self, state: TrainerState) -> bool:
        return self._saved[0] == state.global_step

    def _collect_late(self, state: TrainerState) -> dict[str, Any]:
        """Take the state after the model has been saved. Raises ConfigError if that would change
        the model.
        """
        if not self.islands.is_settled:
            raise ConfigError(
                f"the trainer has saved its model at step {state.global_step} because of a "
                "callback that asked for it after IslandsCallback, and a round is under way that "
                "the saved model does not contain; put IslandsCallback behind that callback in "
                "`callbacks`, or request saves by save_strategy"
            )
        return self.islands.state_dict()

    def _count(self, args: TrainingArguments, state: TrainerState) -> int:
        """Return the tokens of the step that this rank counts. The trainer counts the tokens of all
        ranks together.
        """
        if args.include_num_input_tokens_seen == "no":
            return args.per_device_train_batch_size * args.gradient_accumulation_steps
        before = self._tokens_before
        self._tokens_before = int(state.num_input_tokens_seen)
        return self._tokens_before - before if args.process_index == 0 else 0


def saved_path(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the path of this rank's state of the outer loop in the trainer's checkpoint of its
    current step.
    """
    assert args.output_dir is not None, "TrainingArguments sets a default"
    return state_path(Path(args.output_dir) / f"checkpoint-{state.global_step}", args.process_index)
