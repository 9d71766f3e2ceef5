"""What holds in the trainers of others, by the table in docs/library.md."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from accelerate import Accelerator
from transformers import EarlyStoppingCallback, TrainerCallback

import diloco
from diloco.errors import ConfigError
from diloco.own_loop.huggingface import IslandsCallback
from tests.diloco.own_loop.test_huggingface import tiny_llama, train
from tests.swarm import read_records

OUTER = {"transport": "loopback", "rounds": 3, "inner_steps": 2, "start_islands": 1}


def records(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return [
        each
        for each in read_records(folder / "runs" / name / "island-0" / "metrics.jsonl")
        if each["kind"] == kind
    ]


def alone(folder: Path, name: str, model: nn.Module | None = None) -> diloco.Islands:
    config = {"name": name, "outer": OUTER, "island": {"run_dir": str(folder / "runs")}}
    return diloco.Islands(config, model or nn.Linear(2, 2))


def finish(islands: diloco.Islands) -> int:
    while not islands.is_over:
        islands.step(tokens=1)
    return islands.round


def test_a_trainers_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"}
    assert train(tmp_path, "run", **settings).islands.is_over
    assert [each["tokens"] for each in records(tmp_path, "run", "step")] == [
        64 * (step + 1) for step in range(6)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 3},
        {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_steps": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "greater_is_better": True,  # so that it never gets better
            "callbacks": [EarlyStoppingCallback(2)],
        },
    ],
    ids=["max_steps", "early stopping"],
)
def test_a_trainer_that_ends_first_leaves_the_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    islands = train(tmp_path, "run", delay=0, **settings).islands
    assert islands.is_over and islands.round == 1
    assert records(tmp_path, "run", "event")[-1]["text"] == "the loop leaves; 1 rounds are done"


class FailsOnce(TrainerCallback):
    def __init__(self) -> None:
        self._is_to_fail = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_to_fail and state.global_step == 3:
            self._is_to_fail = False
            raise OSError("the disk is away")


def test_a_trainer_that_failed_trains_again(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = torch.arange(16).repeat(40, 1).tolist()
    fields = {
        "max_steps": 50,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    callback = IslandsCallback(
        {"name": "run", "outer": OUTER, "island": {"run_dir": str(tmp_path / "runs")}}
    )
    trainer = Trainer(
        tiny_llama(),
        TrainingArguments(output_dir=str(tmp_path / "out"), **fields),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        callbacks=[callback, FailsOnce()],
    )
    with pytest.raises(OSError, match="the disk is away"):
        trainer.train()
    assert not callback.islands.is_over, "no callback hears of it"
    trainer.train()
    assert callback.islands.is_over and callback.islands.round == 3


def test_accelerates_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    islands, batches = alone(tmp_path, "run", model), 0
    while not islands.is_over:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
        if accelerator.sync_gradients:
            islands.step(tokens=4)
    assert (batches, islands.round) == (12, 3)


def test_fabrics_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    fabric_package = pytest.importorskip("lightning_fabric")
    from diloco.own_loop.fabric import IslandsCallback as FabricCallback

    callback = FabricCallback(
        {"name": "run", "outer": OUTER, "island": {"run_dir": str(tmp_path / "runs")}}
    )
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, callbacks=[callback])
    fabric.launch()
    model = nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = 0
    for batch in callback.until_over([torch.ones(2, 4)]):
        fabric.backward(model(batch).sum() / 2)
        batches += 1
        if batches % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert (batches, callback.islands.round) == (12, 3)


def fabric_with_islands(folder: Path) -> tuple[Any, Any, nn.Module, torch.optim.Optimizer]:
    """Fabric with a callback, and a model and an optimizer of it; the checkpoint has a model of
    ones.
    """
    fabric_package = pytest.importorskip("lightning_fabric")
    from diloco.own_loop.fabric import IslandsCallback as FabricCallback

    callback = FabricCallback(
        {"name": "run", "outer": OUTER, "island": {"run_dir": str(folder / "runs")}}
    )
    fabric = fabric_package.Fabric(accelerator="cpu", devices=1, callbacks=[callback])
    fabric.launch()
    model = nn.Linear(2, 1, bias=False)
    fabric.save(folder / "ones.ckpt", {"model": {"weight": torch.ones(1, 2)}})
    return fabric, callback, *fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_what_fabric_loads_after_its_setup_is_what_the_run_begins_with(tmp_path: Path) -> None:
    fabric, callback, model, _ = fabric_with_islands(tmp_path)
    fabric.load(tmp_path / "ones.ckpt", {"model": model})
    model(torch.ones(1, 2))
    with torch.no_grad():
        model.weight.zero_()
    with callback.islands.global_params():
        assert torch.equal(model.weight, torch.ones(1, 2))


def test_what_fabric_loads_into_a_run_that_was_entered_is_refused(tmp_path: Path) -> None:
    fabric, callback, model, _ = fabric_with_islands(tmp_path)
    assert callback.islands.round == 0
    fabric.load(tmp_path / "ones.ckpt", {"model": model})
    with pytest.raises(
        ConfigError, match=r"after the run was entered.* call fabric\.load after fabric\.setup"
    ):
        model(torch.ones(1, 2))
    assert callback.islands.is_over


def test_an_exception_in_a_with_block_says_goodbye_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), alone(tmp_path, "run") as islands:
        islands.step(tokens=1 // 0)
    assert islands.is_over
    assert records(tmp_path, "run", "event")[-1]["text"].startswith(
        "ZeroDivisionError in the loop; 0 rounds are done"
    )


def test_a_process_has_several_islands_one_after_the_other_or_of_other_runs(tmp_path: Path) -> None:
    first, other = alone(tmp_path, "one"), alone(tmp_path, "two")
    with pytest.raises(ConfigError, match="a running island uses the folder"):
        alone(tmp_path, "one")
    assert finish(other) == 3
    first.leave()
    assert finish(alone(tmp_path, "one")) == 3
