"""A pipeline of torch in a loop of one's own, beside an island of one process: killed in a round,
and back.
"""

import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from diloco.config.schema import Config
from diloco.own_loop.islands import Islands
from tests.diloco.own_loop.loops import TOKENS, own_config
from tests.swarm import swarm

WIDTH = 8
RUN = {"rounds": 5, "quorum": 2, "below_quorum": "wait"}
FAULT = "kill:1@round=2,phase=send"
"""Kills the first rank of island 1; the second one ends by the error of its connection."""


class Layers(nn.Module):
    """Layers of a model under their numbers in the whole model."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            self.layers[str(number)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def make_step(model: Layers, schedule: Schedule1F1B | None, seed: int) -> None:
    """One forward and backward pass on inputs that follow from the seed, by the schedule if there
    is one.
    """
    inputs = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    target = inputs.flip(1)
    if schedule is None:
        mean_square(model(inputs), target).backward()
    elif dist.get_rank() == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=target, losses=[])


def train(config: Config, index: int) -> tuple[str, dict[str, torch.Tensor]]:
    """Train to the end. Returns the digest, and the parameters of all ranks."""
    schedule = None
    if config.for_island(index).ranks == 1:
        model = Layers(0, 1)
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = Layers(rank)
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=mean_square)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    island = {"faults": [FAULT]} if index == 1 else {}
    with Islands(own_config(config, index, island, **RUN), [model], optimizer) as islands:
        for unit in islands.units():
            make_step(model, schedule, unit)
            optimizer.step()
            optimizer.zero_grad()
            islands.step(tokens=TOKENS if islands.place[0] == 0 else 0)
        digest = islands.digest
    return digest, gather(model)


def gather(model: nn.Module) -> dict[str, torch.Tensor]:
    held = dict(model.state_dict())
    if not dist.is_initialized():
        return held
    parts = [held] * dist.get_world_size()
    dist.all_gather_object(parts, held)
    return {name: value for part in parts for name, value in part.items()}


def test_a_pipeline_is_killed_in_a_round_and_comes_back_to_one_digest(tmp_path: Path) -> None:
    with swarm(tmp_path, islands=[{}, {"ranks": 2}]) as made:
        whole, pipeline = made.start_all(train)
        codes = pipeline.wait()
        assert codes[0] == -signal.SIGKILL and codes[1] != 0, pipeline.log[-3000:]
        again = made.start(1, train)
        for island in (whole, again):
            island.finish()
        (digest, params), (same, gathered) = whole.result(), again.result()
    assert digest == same
    assert params.keys() == gathered.keys() == Layers(0, 1).state_dict().keys()
    assert all(torch.equal(value, gathered[name]) for name, value in params.items())
