"""Islands that are torchtitan's trainer, forked from one process that has imported it
(tests/swarm.py).
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.distributed import ParallelDims
from torchtitan.trainer import Trainer

from diloco.config.schema import Config
from diloco.own_loop.model.names import clean_name
from tests.diloco.own_loop.loops import own_config
from tests.diloco.titan import small

ROUNDS, STEPS = 4, 3
Work = Callable[[Config, int], dict[str, Any]]


class Kept:
    """A logger of torchtitan that keeps the metrics of each step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.steps.setdefault(step, {}).update(metrics)

    def close(self) -> None:
        pass


def trains(
    make: Callable[[], Trainer.Config] = small.llama3,
    *,
    island: Mapping[str, Any] | None = None,
    change: Callable[[Trainer.Config], None] = lambda config: None,
    begin: Callable[[Any], None] = lambda trainer: None,
    outer: Mapping[str, Any] | None = None,
    **degrees: Any,
) -> Work:
    """The work of an island with torchtitan's trainer, whose ranks have these degrees of
    parallelism.

    `change` is made to the trainer's config, and `begin` to the trainer before it trains.
    """

    def work(config: Config, index: int) -> dict[str, Any]:
        os.chdir(config.for_island(index).run_dir)
        titan = make()
        for name, value in degrees.items():
            setattr(titan.parallelism, name, value)
        dims = ParallelDims.from_config(titan.parallelism, int(os.environ["WORLD_SIZE"]))
        titan.training.local_batch_size = small.SEQUENCES // (dims.dp_replicate * dims.dp_shard)
        titan.dump_folder = str(Path(config.for_island(index).run_dir) / "titan")
        if hasattr(titan, "islands"):
            rules = {
                "rounds": ROUNDS,
                "inner_steps": STEPS,
                "quorum": len(config.islands),
                "below_quorum": "wait",
            }
            rules |= {"part_elements": 1 << 18, "wait_seconds": 600.0}
            titan.island_parts = len(config.islands)
            titan.islands = own_config(
                config, index, dict(island or {}), **rules | dict(outer or {})
            )
        change(titan)
        return run(titan, begin)

    return work


def run(config: Trainer.Config, begin: Callable[[Any], None]) -> dict[str, Any]:
    """Train as `torchtitan.train` does, and return what the trainer has logged and what it holds at
    the end.
    """
    trainer = config.build()
    trainer.metrics_processor.logger = kept = Kept()
    begin(trainer)
    try:
        trainer.train()
        found = {"steps": kept.steps, "tensors": full_tensors(trainer), "step": trainer.step}
        if hasattr(trainer, "islands"):
            found["digest"] = trainer.islands.digest
    finally:
        trainer.close()
    dist.destroy_process_group()
    return found


def draw_by_name(trainer: Any) -> None:
    """Give parameters values that follow from their names. torchtitan's own differ between
    meshes.
    """
    for part in trainer.model_parts:
        for name, param in part.named_parameters():
            seed = zlib.crc32(clean_name(name).encode())
            values = 0.02 * torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
            if isinstance(param, DTensor):
                values = distribute_tensor(values, param.device_mesh, param.placements)
            with torch.no_grad():
                param.copy_(values)


def full_tensors(trainer: Any) -> dict[str, str]:
    """Hashes of all parameters and biases of routers of the island, by their names in the whole
    model.
    """
    mine = {}
    for part in trainer.model_parts:
        named = [
            *part.named_parameters(),
            *(each for each in part.named_buffers() if "expert_bias" in each[0]),
        ]
        for name, tensor in named:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            mine[clean_name(name)] = hash_of(whole)
    by_rank: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return {name: value for theirs in by_rank for name, value in theirs.items()}


def hash_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()
