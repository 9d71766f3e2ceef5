"""Islands around Hugging Face's `Trainer`, and so around TRL's trainers: a callback. Needs `transformers`.

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[IslandsCallback("run.yaml")])
    trainer.train()

The trainer stops when the run is over, or after its own max_steps; make those at least outer.rounds x inner_steps. Its
step and its schedule are those of the run, also of an island that comes back.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.errors import ConfigError
from diloco.own_loop.islands import Islands
from diloco.own_loop.saved_state import read_state, write_state
from diloco.own_loop.schedules import Scheduler, skip_steps


class IslandsCallback(TrainerCallback):
    """Makes the processes of a `Trainer` one island of a run.

    Islands weigh as many tokens as they trained on if `include_num_input_tokens_seen` is set in the training arguments,
    else as many examples; choose the same on all islands. Give each island a dataset of its own.
    """

    islands: Islands
    """Made when training begins."""

    def __init__(self, config: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> None:
        self._config, self._overrides = config, overrides
        self._tokens_before = 0
        self._saved: tuple[int, dict[str, Any]] = -1, {}
        """The trainer's step, and the state of the outer loop then."""

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
        """Enter the run, with the outer loop's state of the checkpoint from which the trainer resumes."""
        assert model is not None, "a trainer has a model"
        if hasattr(self, "islands"):
            self.islands.close("the trainer begins again")  # It may have ended by an exception, which no callback sees.
        path = saved_path(args, state)
        saved = read_state(path) if state.global_step and path.exists() else None
        self.islands = Islands(self._config, model, optimizer, self._overrides, state=saved)
        self._tokens_before, self._saved = int(state.num_input_tokens_seen), (-1, {})
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

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._collect(args, state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._collect(args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the outer loop's state of this rank beside the trainer's own. Raises ConfigError if it is too late."""
        saved = self._saved[1] if self._is_collected(state) else self._collect_late(state)
        write_state(saved, saved_path(args, state))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.islands.leave()

    def _follow(self, state: TrainerState, lr_scheduler: Scheduler | None) -> None:
        """Let the trainer's step and its schedule pass over steps of the run that were made without this island."""
        num_missed = self.islands.steps - state.global_step
        if num_missed > 0:
            state.global_step = self.islands.steps
            if lr_scheduler is not None:
                skip_steps(lr_scheduler, num_missed, self.islands.steps)

    def _collect(self, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
        """Take the state before the trainer saves the model: that lands a round in flight, which changes the model.

        Whether a model is the best, and saved, the trainer finds out in its evaluation, which is of the landed model.
        """
        may_be_best = control.should_evaluate and args.save_strategy == "best"
        if (control.should_save or may_be_best) and not self._is_collected(state):
            self._saved = state.global_step, self.islands.state_dict()

    def _is_collected(self, state: TrainerState) -> bool:
        return self._saved[0] == state.global_step

    def _collect_late(self, state: TrainerState) -> dict[str, Any]:
        """The state, where the model is saved already, and must be as it was. Raises ConfigError if it would not be."""
        if not self.islands.is_settled:
            raise ConfigError(
                f"the trainer has saved its model at step {state.global_step} because of a callback that asked for it "
                "after IslandsCallback, and a round is under way that the saved model does not contain; put "
                "IslandsCallback behind that callback in `callbacks`, or ask for saves by save_strategy"
            )
        return self.islands.state_dict()

    def _count(self, args: TrainingArguments, state: TrainerState) -> int:
        """Tokens of the step that this rank counts. The trainer counts those of all ranks together."""
        if args.include_num_input_tokens_seen == "no":
            return args.per_device_train_batch_size * args.gradient_accumulation_steps
        before, self._tokens_before = self._tokens_before, int(state.num_input_tokens_seen)
        return self._tokens_before - before if args.process_index == 0 else 0


def saved_path(args: TrainingArguments, state: TrainerState) -> Path:
    """Where this rank's state of the outer loop lies in the trainer's checkpoint of its current step."""
    assert args.output_dir is not None, "TrainingArguments fill it in"
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / f"islands-{args.process_index}.safetensors"
