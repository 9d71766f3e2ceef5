"""Islands around Hugging Face's `Trainer`, and so around TRL's trainers: a callback. Needs `transformers`.

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[IslandsCallback("run.yaml")])
    trainer.train()

The trainer stops when the run is over, or after its own max_steps; make those at least outer.rounds x inner_steps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diloco.own_loop.islands import Islands
from diloco.own_loop.saved_state import read_state, write_state


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
        self._saved: dict[str, Any] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **_: Any,
    ) -> None:
        """Enter the run, with the outer loop's state of the checkpoint from which the trainer resumes."""
        assert model is not None, "a trainer has a model"
        path = saved_path(args, state)
        saved = read_state(path) if state.global_step and path.exists() else None
        self.islands = Islands(self._config, model, optimizer, self._overrides, state=saved)
        self._tokens_before = int(state.num_input_tokens_seen)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the step, launch and land rounds."""
        self.islands.step(self._count(args, state))
        if self.islands.is_over:
            control.should_training_stop = True
        self._collect(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._collect(control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the outer loop's state of this rank beside the trainer's own."""
        write_state(self._saved, saved_path(args, state))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.islands.leave()

    def _collect(self, control: TrainerControl) -> None:
        """Take the state before the trainer saves the model: that lands a round in flight, which changes the model."""
        if control.should_save:
            self._saved = self.islands.state_dict()

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
