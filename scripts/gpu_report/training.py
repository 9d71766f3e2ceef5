"""Builds the real trainer in this process for a section, and the text that it trains on."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.config.schema import IslandConfig
from diloco.runtime.process_group import open_process_group
from inner.config import OptimizerConfig, ParallelConfig
from inner.measure.workload import Workload
from inner.mesh import Degrees, IslandMesh
from inner.model.init import STD, initialise
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from inner.params import LocalParams
from inner.trainer import Trainer, TrainerSettings
from outer.space.ranks import RankGroup
from scripts.gpu_report.place import Place

TINY = ModelSizes(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=128, vocab_size=260)
EOS = 7


@dataclass(frozen=True)
class TrainingCase:
    """A model and how an island trains it, of one rank unless `degrees` say otherwise."""

    sizes: ModelSizes
    seq_len: int
    micro_batch: int
    dtype: str = "bfloat16"
    num_micro_batches: int = 1
    """Micro-batches of all ranks together."""
    degrees: Degrees = field(default_factory=Degrees)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    masks_documents: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of an inner step."""
        return self.num_micro_batches * self.micro_batch * self.seq_len

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(lr=1e-3, warmup_steps=2, tokens_per_step=self.tokens)

    @property
    def work(self) -> Workload:
        return Workload(
            sizes=self.sizes,
            degrees=self.degrees,
            parallel=self.parallel,
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            num_micro_batches=self.num_micro_batches // self.degrees.num_data_ranks,
            compute_itemsize=2 if self.dtype == "bfloat16" else 4,
        )

    def build(self, device: str, *, weights_matter: bool = True) -> Trainer:
        """Build this rank's trainer, and free the memory of earlier trainers.

        The process group must be open, as in `one_rank`. If `weights_matter`, weights are drawn
        from the seed, as in a run: the same on every device. Otherwise they are filled in on the
        device.
        """
        free_memory(forgets_compiled=self.parallel.compile is True)
        settings = TrainerSettings(
            device=device,
            compute_dtype=self.dtype,
            micro_batch=self.micro_batch,
            seq_len=self.seq_len,
            seed=1,
            total_steps=1000,
            eos_id=EOS if self.masks_documents else None,
            draw_weights=initialise if weights_matter else fill_on_device,
        )
        mesh = IslandMesh(self.degrees, torch.device(device).type)
        # Nothing is compiled unless the section asks for it.
        parallel = self.parallel.model_copy(update={"compile": self.parallel.compile is True})
        return Trainer(self.sizes, self.optimizer, mesh, parallel, settings)

    def windows(self, step: int) -> list[Tensor]:
        """Return a step's text, the same on every device: random, with a learnable pattern."""
        generator = torch.Generator().manual_seed(step)
        shape = self.num_micro_batches, self.micro_batch, self.seq_len + 1
        windows = torch.randint(0, self.sizes.vocab_size, shape, generator=generator)
        windows[..., 1::2] = windows[..., 0:-1:2] // 2
        return list(windows)


def fill_on_device(params: LocalParams, stages: Sequence[Transformer], seed: int) -> None:
    """Fill weights and tables on their device.

    `initialise` draws only about 0.1 billion weights per second, on the host.
    """
    for stage in stages:
        for param in stage.parameters():
            nn.init.normal_(param, std=STD) if param.ndim > 1 else nn.init.ones_(param)
        stage.fill_tables()


def free_memory(*, forgets_compiled: bool) -> None:
    """Free the memory of earlier models.

    Their compiled code holds some of it, and counts towards torch's limit.
    """
    if forgets_compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def one_rank(place: Place) -> Iterator[RankGroup]:
    """Make this process an island of one rank, with the groups that a run would have."""
    # fp32 products are exact, not TF32, because they are compared with the CPU's.
    island = IslandConfig.model_validate({"device": place.device, "matmul_precision": "highest"})
    with open_process_group(island, place.first) as ranks:
        try:
            yield ranks
        finally:
            dist.destroy_process_group()


def wait_for_device(place: Place) -> None:
    if not place.is_tiny:
        torch.cuda.synchronize()
