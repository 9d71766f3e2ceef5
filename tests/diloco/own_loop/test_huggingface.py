"""The callback for Hugging Face's Trainer, with a tiny Llama."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from diloco.own_loop.huggingface import IslandsCallback
from diloco.own_loop.model.params import describe, trained_params


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes)).float()


def train(folder: Path, name: str, *, max_steps: int = 100, resume: str | None = None) -> IslandsCallback:
    """Train alone, with a round in flight at every save, until the run of six steps is over or for `max_steps`."""
    outer = {"transport": "loopback", "rounds": 3, "inner_steps": 2, "delay": 1, "start_islands": 1}
    callback = IslandsCallback({"name": name, "outer": outer, "island": {"run_dir": str(folder / "runs")}})
    arguments = TrainingArguments(
        output_dir=str(folder / name),
        per_device_train_batch_size=2,
        max_steps=max_steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = torch.arange(16).repeat(400, 1).tolist()
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    Trainer(tiny_llama(), arguments, train_dataset=dataset, callbacks=[callback]).train(resume_from_checkpoint=resume)
    return callback


def test_a_trainer_that_resumes_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole")
    train(tmp_path, "broken", max_steps=4)
    resumed = train(tmp_path, "broken", resume=str(tmp_path / "broken" / "checkpoint-3"))
    assert whole.islands.is_over and resumed.islands.is_over
    assert resumed.islands.digest == whole.islands.digest


def test_of_a_model_with_adapters_only_they_travel() -> None:
    model = tiny_llama()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert isinstance(adapted, nn.Module)
    specs = trained_params(adapted).specs
    assert all("lora_" in spec.name for spec in specs)
    assert describe(specs).startswith("2 parameters with 64 elements")
