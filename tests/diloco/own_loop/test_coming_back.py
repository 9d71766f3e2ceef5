"""An island of somebody's trainer that comes when the run goes on already: its step and its
learning rate.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.config.schema import Config
from diloco.own_loop.islands import Islands
from tests.diloco.own_loop.loops import STEPS, TOKENS, folder_of, one_step, own_config, small_model
from tests.faults.waits import until
from tests.swarm import read_records, swarm

RUN = {"start_islands": 1, "rounds": 5}
WARM_UP = 100


def share(step: int) -> float:
    """Of the learning rate, at a step of the run."""
    return (step + 1) / WARM_UP


def rounds(config: Config) -> int:
    """Those that the first island has committed."""
    return sum(
        record["kind"] == "round" for record in read_records(folder_of(config, 0) / "metrics.jsonl")
    )


def begin(config: Config, index: int) -> None:
    """Three rounds alone, and the rest with the island that comes."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with Islands(own_config(config, index, **RUN), model, optimizer) as islands:
        for unit in islands.units():
            one_step(model, optimizer, unit)
            islands.step(tokens=TOKENS)
            if islands.round == 3:
                until(
                    lambda: bool(read_records(folder_of(config, 1) / "metrics.jsonl")),
                    "the other has entered",
                )


class WithLoss(nn.Module):
    """The small model as a Trainer calls it, under the same names."""

    def __init__(self) -> None:
        super().__init__()
        for name, module in small_model(seed=1).named_children():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for module in self.children():
            x = module(x)
        return {"loss": (x - labels).square().mean()}


def come_by_trainer(config: Config, index: int) -> list[tuple[int, float]]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from diloco.own_loop.huggingface import IslandsCallback

    seen: list[tuple[int, float]] = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
        ) -> None:
            seen.append((state.global_step, optimizer.param_groups[0]["lr"]))

    arguments = TrainingArguments(
        output_dir=str(folder_of(config, index) / "trainer"),
        max_steps=5 * STEPS,
        save_strategy="no",
        per_device_train_batch_size=TOKENS,
        learning_rate=1.0,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": torch.zeros(4), "labels": torch.zeros(1)}] * 1000
    model = WithLoss()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,  # pyright: ignore[reportArgumentType]
        callbacks=[IslandsCallback(own_config(config, index, {"joins": True}, **RUN)), Look()],
        optimizers=(
            (optimizer := torch.optim.SGD(model.parameters(), lr=1.0)),
            LambdaLR(optimizer, share),
        ),
    )
    trainer.train()
    assert trainer.state.global_step == 5 * STEPS
    return seen


def come_by_fabric(config: Config, index: int) -> list[tuple[int, float]]:
    from lightning_fabric import Fabric

    from diloco.own_loop.fabric import IslandsCallback

    callback = IslandsCallback(
        own_config(config, index, {"joins": True}, **RUN), tokens_per_step=TOKENS
    )
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[callback])
    fabric.launch()
    model = small_model(seed=1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = callback.follow(LambdaLR(optimizer, share))
    seen = []
    for _ in callback.until_over([0]):
        seen.append((callback.islands.steps, optimizer.param_groups[0]["lr"]))
        fabric.backward(model(torch.zeros(1, 4)).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return seen


CASES = [
    pytest.param(come_by_trainer, "transformers", id="Trainer"),
    pytest.param(come_by_fabric, "lightning_fabric", id="Fabric"),
]


@pytest.mark.parametrize("come, package", CASES)
def test_an_island_that_comes_late_goes_on_at_the_step_and_the_learning_rate_of_the_run(
    tmp_path: Path, come: Any, package: str
) -> None:
    pytest.importorskip(package)
    with swarm(tmp_path, islands=[{}, {}]) as made:
        made.start(0, begin)
        until(lambda: rounds(made.config) >= 2, "two rounds alone", made.started[0])
        second = made.start(1, come)
        for island in made.started:
            island.finish()
        seen = second.result()
    assert seen[0][0] >= 2 * STEPS
    assert [lr for _, lr in seen] == pytest.approx([share(step) for step, _ in seen])
    assert [step for step, _ in seen] == list(range(seen[0][0], 5 * STEPS))
