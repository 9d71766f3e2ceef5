"""Small training loops around `diloco.Islands`, which tests run as islands (tests/swarm.py)."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import diloco
from diloco.config.schema import Config
from tests.faults.waits import until

ROUNDS, STEPS = 3, 2
TOKENS = 16
ModelAndDigest = tuple[dict[str, torch.Tensor], str]


def own_config(
    config: Config,
    index: int,
    island: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **outer: Any,
) -> dict[str, Any]:
    """The config of island `index` of a swarm of tests, as a loop of one's own has it, with `more`
    sections.
    """
    there = config.for_island(index)
    own = {
        "index": index,
        "bootstrap": list(there.bootstrap),
        "run_dir": there.run_dir,
        "connect_seconds": 20,
    }
    rules = {
        "rounds": ROUNDS,
        "inner_steps": STEPS,
        "transport": "gloo",
        "start_islands": len(config.islands),
    }
    rules |= {"wait_seconds": 60.0, "part_elements": 1024}
    return {"name": "own", "outer": rules | outer, "island": own | (island or {})} | (more or {})


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """Fit the sum of the inputs, which follow from the seed. Returns the loss."""
    inputs = torch.randn(TOKENS, 4, generator=torch.Generator().manual_seed(seed))
    loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def finish(
    islands: diloco.Islands, model: nn.Module, optimizer: torch.optim.Optimizer
) -> ModelAndDigest:
    """Train until the run is over. Returns the model's state and the digest."""
    for unit in islands.units():
        loss = one_step(model, optimizer, unit)
        islands.step(tokens=TOKENS, loss=loss)
    return model.state_dict(), islands.digest


def train_small(
    seed: int = 0, island: dict[str, Any] | None = None, **outer: Any
) -> Callable[[Config, int], Any]:
    """The work of an island that trains the small model to the end."""

    def work(config: Config, index: int) -> ModelAndDigest:
        model = small_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        islands = diloco.Islands(own_config(config, index, island, **outer), model, optimizer)
        return finish(islands, model, optimizer)

    return work


def saved_at(folder: Path, index: int) -> Path:
    return folder / f"saved-{index}.pt"


def train_saving_and_die(folder: Path, steps: int, **outer: Any) -> Callable[[Config, int], Any]:
    """The work of an island that saves after so many steps, makes one more and is killed before it
    counts that.

    It is killed when all have saved: one that dies with its vote on the way leaves the others
    waiting for it.
    """

    def work(config: Config, index: int) -> None:
        all_saved = [saved_at(folder, each) for each in range(len(config.islands))]
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        islands = diloco.Islands(own_config(config, index, **outer), model, optimizer)
        for made, unit in enumerate(islands.units()):
            one_step(model, optimizer, unit)
            if made == steps:
                until(lambda: all(path.exists() for path in all_saved), "all islands have saved")
                os.kill(os.getpid(), signal.SIGKILL)
            islands.step(tokens=TOKENS)
            if made + 1 == steps:
                parts = {"model": model, "optimizer": optimizer, "islands": islands}
                torch.save(
                    {name: part.state_dict() for name, part in parts.items()},
                    saved_at(folder, index),
                )

    return work


def train_from_saved(folder: Path, **outer: Any) -> Callable[[Config, int], Any]:
    """The work of an island that goes on from what `train_saving_and_die` has saved."""

    def work(config: Config, index: int) -> ModelAndDigest:
        saved = torch.load(saved_at(folder, index), weights_only=True)
        model = small_model(seed=1)
        model.load_state_dict(saved["model"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer.load_state_dict(saved["optimizer"])
        islands = diloco.Islands(
            own_config(config, index, **outer), model, optimizer, state=saved["islands"]
        )
        return finish(islands, model, optimizer)

    return work


def train_on_ranks(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Config, int], Any]:
    """The work of an island whose ranks share each unit, with a model that is wrapped for them."""

    def work(config: Config, index: int) -> str:
        dist.init_process_group("gloo")
        model = wrap(small_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        islands = diloco.Islands(own_config(config, index), model, optimizer)
        for unit in islands.units():
            one_step(model, optimizer, 10 * unit + dist.get_rank())
            islands.step(tokens=TOKENS)
        return islands.digest

    return work


def folder_of(config: Config, index: int) -> Path:
    return Path(config.for_island(index).run_dir) / "own" / f"island-{index}"
