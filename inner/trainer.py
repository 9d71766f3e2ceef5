"""Trains one island's model: one call, one inner step over all of the island's ranks."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from inner.config import OptimizerConfig, ParallelConfig
from inner.errors import TrainingStopped
from inner.gradients import scale_gradients, squared_norm, sum_tied
from inner.huggingface.load import load_weights
from inner.init import initialise
from inner.mesh import IslandMesh, accumulation
from inner.model import Transformer
from inner.optim import build_optimizers, lr_at, set_lr
from inner.parallel.build import Layout, build_parts, build_pipeline, tied_ends
from inner.parallel.check import check_layout
from inner.parallel.fsdp import drop_gathered
from inner.parallel.one_stage import OneStage
from inner.params import LocalParams
from inner.presets import ModelSizes
from inner.windows import Cutter, empty_window, num_targets

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StepResult:
    """What one inner step did, the same on every rank (but for `seconds`)."""

    step: int
    """Inner steps done, this one included."""
    tokens: int
    """Valid targets over all ranks."""
    loss: float | None
    """Mean over those tokens, in nats; None when the step was skipped."""
    lr: float
    grad_norm: float | None
    """Before clipping; None when the step was skipped."""
    seconds: float
    is_skipped: bool


@dataclass(frozen=True)
class TrainerSettings:
    """How this island trains; what it trains is in ModelSizes and OptimizerConfig."""

    device: str
    compute_dtype: str
    """float32 or bfloat16; master weights, gradients' reduction and optimizer state are always fp32."""
    micro_batch: int
    """Sequences of one forward pass on one rank."""
    seq_len: int
    seed: int
    """Of the initial weights."""
    total_steps: int
    """Inner steps of the whole run: the length of the learning-rate schedule."""
    eos_id: int | None = None
    """The token that ends a document, when attention must not look past it; None: it may."""
    init_from: Path | None = None
    """A folder with the initial weights, in Hugging Face's layout; None: they follow from the seed."""


class Trainer:
    """A model, its optimizer and its place in the learning-rate schedule. Every rank builds and steps one."""

    parts: list[Transformer]
    """This rank's pipeline stages; the whole model when pp is 1."""
    optimizers: list[torch.optim.Optimizer]
    params: LocalParams
    inner_step: int
    """Inner steps done, skipped ones included; a joiner sets it to continue the schedule."""

    def __init__(
        self,
        sizes: ModelSizes,
        optimizer_config: OptimizerConfig,
        mesh: IslandMesh,
        parallel: ParallelConfig,
        settings: TrainerSettings,
    ) -> None:
        """Raises InputError if the mesh cannot hold the model, a step's tokens do not divide, or init_from fails."""
        self.settings = settings
        self.mesh = mesh
        self.inner_step = 0
        self._config = optimizer_config
        self._device = torch.device(settings.device)
        self._skipped_in_a_row = 0
        check_layout(sizes, mesh.degrees, parallel, settings.seq_len, self.micro_batches_per_step)
        dtype = COMPUTE_DTYPES[settings.compute_dtype]
        layout = Layout(sizes, settings.seq_len, mesh, parallel, dtype, self._device)
        self.parts = build_parts(layout)
        with torch.device("meta"):
            whole = Transformer(sizes, layout.positions)
        self.params = LocalParams(whole, self.parts)
        if settings.init_from is None:
            initialise(self.params, self.parts, settings.seed)
        else:
            load_weights(self.params, self.parts, settings.init_from)
        names = [spec.name for spec in self.params.specs]
        self.optimizers = build_optimizers(list(self.parts), names, optimizer_config)
        self._cut = Cutter(layout.positions, settings.seq_len, settings.eos_id)
        self._tied_ends = tied_ends(layout)
        self._runner = build_pipeline(
            layout, self.parts, settings.micro_batch, self.micro_batches_per_step
        ) or OneStage(self.parts[0], self._device)

    @property
    def data_rank(self) -> int:
        """Which share of the island's sequences this rank reads."""
        return self.mesh.data_rank

    @property
    def num_data_ranks(self) -> int:
        return self.mesh.degrees.num_data_ranks

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches that step() wants of this rank."""
        return accumulation(
            self._config.tokens_per_step,
            self.settings.seq_len,
            self.settings.micro_batch,
            self.num_data_ranks,
        )

    def step(self, micro_batches: Sequence[Tensor]) -> StepResult:
        """One inner step on this rank's micro-batches (micro_batch, seq_len + 1), int64; target -100 is ignored.

        Every rank must call it with as many micro-batches; ranks of the same data_rank with the same ones. A
        non-finite loss or gradient anywhere skips the step everywhere; too many in a row raise TrainingStopped,
        everywhere too.
        """
        started_at = time.perf_counter()
        windows = [window.to(self._device) for window in micro_batches]
        my_tokens = sum(map(num_targets, windows)) if self._speaks_for_data else 0
        tokens, num_windows = self._sum_over_ranks([my_tokens, len(windows)])
        assert num_windows == len(windows) * self.mesh.degrees.num_ranks > 0, f"{len(windows)} here, {num_windows}"
        my_loss = self._runner.backward([self._cut(window) for window in windows], scale=1.0 / max(tokens, 1.0))
        sum_tied(self.parts, self._tied_ends)
        # One rank's verdict is every rank's: what they add up to is the same everywhere.
        loss_sum, norm_2 = self._sum_over_ranks([self._counted_loss(my_loss), squared_norm(self.parts).item()])
        is_skipped = tokens == 0 or not math.isfinite(loss_sum) or not math.isfinite(norm_2)

        lr = lr_at(self.inner_step, self.settings.total_steps, self._config)
        if not is_skipped:
            self._update(lr, math.sqrt(norm_2))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.inner_step += 1
        self._guard(is_skipped, loss_sum)
        return StepResult(
            step=self.inner_step,
            tokens=int(tokens),
            loss=None if is_skipped else loss_sum / tokens,
            lr=lr,
            grad_norm=None if is_skipped else math.sqrt(norm_2),
            seconds=time.perf_counter() - started_at,
            is_skipped=is_skipped,
        )

    def evaluate(self, windows: Iterable[Tensor]) -> tuple[float, int]:
        """(loss in nats summed, tokens) over all ranks' windows; leaves training state alone.

        Every rank must call it with its own share, ranks of the same data_rank with the same one; shares may differ
        in number, down to none.
        """
        mine = [window.to(self._device) for window in windows]
        most = torch.tensor(len(mine), device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        # A forward is collective: all ranks must run as many.
        empty = empty_window(self.settings.micro_batch, self.settings.seq_len, self._device)
        windows = mine + [empty] * (int(most) - len(mine))
        my_loss = self._counted_loss(self._runner.evaluate([self._cut(window) for window in windows]))
        for part in self.parts:
            drop_gathered(part)
        my_tokens = sum(map(num_targets, mine)) if self._speaks_for_data else 0
        loss_sum, tokens = self._sum_over_ranks([my_loss, my_tokens])
        return loss_sum, int(tokens)

    @property
    def _speaks_for_data(self) -> bool:
        """Whether this rank, of those that read the same sequences, counts their tokens."""
        at = self.mesh.at
        return at["pp"] == at["cp"] == at["tp"] == 0

    def _counted_loss(self, loss: Tensor) -> float:
        """The loss, once of the tensor-parallel ranks that all know it."""
        return loss.item() if self.mesh.at["tp"] == 0 else 0.0

    def _sum_over_ranks(self, values: list[float]) -> list[float]:
        """Each value summed over the island's ranks, in fp64. Every rank must call it."""
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return total.tolist()

    def _update(self, lr: float, norm: float) -> None:
        """Clips the gradients, whose norm over the whole mesh is `norm`, and steps the optimizers."""
        clip_norm = self._config.clip_norm
        if clip_norm is not None and norm > clip_norm:
            scale_gradients(self.parts, clip_norm / norm)
        set_lr(self.optimizers, lr)
        for optimizer in self.optimizers:
            optimizer.step()

    def _guard(self, is_skipped: bool, loss_sum: float) -> None:
        """Counts skipped steps in a row. Raises TrainingStopped when there are too many."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_skipped else 0
        if self._skipped_in_a_row > self._config.max_skipped_steps:
            what = "loss" if not math.isfinite(loss_sum) else "gradient"
            raise TrainingStopped(
                f"inner step {self.inner_step}: {self._skipped_in_a_row} steps in a row had a non-finite {what} "
                f"or no valid target, optimizer.max_skipped_steps allows {self._config.max_skipped_steps}; "
                "lower optimizer.lr, lengthen optimizer.warmup_steps, or look at the data"
            )
