"""A model small enough to train in a test, its batches, and views of it on each rank."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inner.config import OptimizerConfig, ParallelConfig
from inner.mesh import Degrees, IslandMesh
from inner.model.init import initialise
from inner.model.sizes import ModelSizes, OwnModel
from inner.model.transformer import Transformer
from inner.params import LocalParams
from inner.trainer import Trainer, TrainerSettings

# 61 tokens and 2 x 24 hidden columns: neither is a multiple of 3 or 4 ranks.
SIZES = ModelSizes(
    dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=50, vocab_size=61, qk_norm=True
)
SEQ_LEN = 16
SEQUENCES = 12
OPTIMIZER = OptimizerConfig(lr=3e-3, warmup_steps=4, tokens_per_step=SEQUENCES * SEQ_LEN)
SETTINGS = TrainerSettings(
    device="cpu", compute_dtype="float32", micro_batch=3, seq_len=SEQ_LEN, seed=7, total_steps=40
)


def build_trainer(
    degrees: Degrees,
    sizes: ModelSizes | OwnModel = SIZES,
    config: OptimizerConfig = OPTIMIZER,
    parallel: ParallelConfig | None = None,
    **settings: Any,
) -> Trainer:
    """A trainer on a CPU mesh. `settings` overrides SETTINGS."""
    mesh = IslandMesh(degrees, "cpu")
    return Trainer(sizes, config, mesh, parallel or ParallelConfig(), replace(SETTINGS, **settings))


def build_model(sizes: ModelSizes = SIZES, seed: int = 3, seq_len: int = 32) -> Transformer:
    """A whole model on the CPU without a mesh, with its initial weights."""
    model = Transformer(sizes, torch.arange(seq_len))
    initialise(LocalParams(model, [model]), [model], seed)
    return model


def batch(step: int) -> Tensor:
    """The island's sequences of a step, (SEQUENCES, SEQ_LEN + 1), with ignored tails of increasing
    length.
    """
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(0, SIZES.vocab_size, (SEQUENCES, SEQ_LEN + 1), generator=generator)
    # A pattern, so that there is something to learn.
    windows[:, 1::2] = windows[:, 0:-1:2] // 2
    for row in range(SEQUENCES):
        windows[row, SEQ_LEN + 1 - row :] = -100
    return windows


def share(trainer: Trainer, windows: Tensor) -> list[Tensor]:
    """This rank's micro-batches of the island's sequences."""
    mine = windows.chunk(trainer.num_data_ranks)[trainer.data_rank]
    return list(mine.split(trainer.settings.micro_batch))


def snapshot(params: LocalParams) -> list[Tensor]:
    """Copies of this rank's slices."""
    return [params.read(index).clone() for index in range(len(params.slices))]


def whole_model(params: LocalParams) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every parameter as a matrix assembled from all ranks' slices, and the number of ranks that
    hold each element.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, list(zip(params.slices, snapshot(params), strict=True)))
    values = {spec.name: torch.full(spec.matrix_shape, torch.nan) for spec in params.specs}
    holders = {
        spec.name: torch.zeros(spec.matrix_shape, dtype=torch.int64) for spec in params.specs
    }
    for pieces in everyone:
        for held, piece in pieces:
            region = slice(*held.rows), slice(*held.cols)
            values[held.name][region] = piece
            holders[held.name][region] += 1
    return values, holders


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference divided by the largest magnitude."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
