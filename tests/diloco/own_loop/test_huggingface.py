"""The callback for Hugging Face's Trainer, with a tiny Llama."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from diloco.errors import ConfigError
from diloco.own_loop.huggingface import IslandsCallback
from diloco.own_loop.model.params import describe, trained_params


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes)).float()


def train(
    folder: Path,
    name: str,
    *,
    delay: int = 1,
    resume: str | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **changes: Any,
) -> IslandsCallback:
    """Train alone, with rounds in flight, until the run of six steps is over or as `changes` of the
    arguments say.
    """
    outer = {
        "transport": "loopback",
        "rounds": 3,
        "inner_steps": 2,
        "delay": delay,
        "start_islands": 1,
    }
    callback = IslandsCallback(
        {"name": name, "outer": outer, "island": {"run_dir": str(folder / "runs")}}
    )
    fields = {
        "max_steps": 100,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_steps": 3,
    }
    fields |= {
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TrainingArguments(output_dir=str(folder / name), **(fields | changes))
    rows = torch.arange(16).repeat(400, 1).tolist()
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    held_out = dataset.select(range(2))
    trainer = Trainer(
        tiny_llama(), arguments, train_dataset=dataset, eval_dataset=held_out, callbacks=[callback]
    )
    for other in callbacks:
        trainer.add_callback(other)
    trainer.train(resume_from_checkpoint=resume)
    return callback


def test_a_trainer_that_resumes_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole")
    train(tmp_path, "broken", max_steps=4)
    resumed = train(tmp_path, "broken", resume=str(tmp_path / "broken" / "checkpoint-3"))
    assert whole.islands.is_over and resumed.islands.is_over
    assert resumed.islands.digest == whole.islands.digest


def test_a_trainer_that_resumes_without_the_state_of_islands_is_refused(tmp_path: Path) -> None:
    train(tmp_path, "broken", max_steps=4)
    checkpoint = tmp_path / "broken" / "checkpoint-3"
    (checkpoint / "islands-0.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"islands-0\.safetensors does not exist: .* load the checkpoint's model"
    ):
        train(tmp_path, "broken", resume=str(checkpoint))


class SaveAt(TrainerCallback):
    """Asks for a checkpoint behind the callback of the islands."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step == self._step:
            control.should_save = True


class SaveEvaluated(TrainerCallback):
    """Asks for a checkpoint after each evaluation."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        control.should_save = True


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "best",
    "metric_for_best_model": "loss",
}


@pytest.mark.parametrize(
    "step, settings",
    [
        pytest.param(2, {"delay": 1, **BEST}, id="the best"),
        pytest.param(
            2,
            {"delay": 1, **BEST, "load_best_model_at_end": True},
            id="the best, loaded at the end",
        ),
        pytest.param(
            4, {"delay": 0, "callbacks": [SaveAt(1), SaveAt(4)]}, id="callbacks behind ours"
        ),
        pytest.param(
            4,
            {
                "delay": 0,
                "save_strategy": "no",
                "eval_strategy": "steps",
                "eval_steps": 2,
                "callbacks": [SaveEvaluated()],
            },
            id="after an evaluation",
        ),
    ],
)
def test_a_checkpoint_holds_the_state_of_its_own_step_whoever_asks_for_it(
    tmp_path: Path, step: int, settings: dict[str, Any]
) -> None:
    whole = train(tmp_path, "whole", **settings)
    train(tmp_path, "broken", **settings | {"max_steps": step + 1})
    resumed = train(
        tmp_path, "broken", **settings, resume=str(tmp_path / "broken" / f"checkpoint-{step}")
    )
    assert resumed.islands.digest == whole.islands.digest


def test_a_checkpoint_that_a_later_callback_asks_for_in_a_round_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="at step 2 because of a callback that asked for it after IslandsCallback"
    ):
        train(tmp_path, "late", delay=1, callbacks=[SaveAt(2)])


def test_of_a_model_with_adapters_only_they_travel() -> None:
    model = tiny_llama()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert isinstance(adapted, nn.Module)
    specs = trained_params(adapted).specs
    assert all("lora_" in spec.name for spec in specs)
    assert describe(specs).startswith("2 parameters with 64 elements")
