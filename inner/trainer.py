"""Trains one island's model: one call, one inner step over all of the island's ranks."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from inner.config import OptimizerConfig
from inner.errors import TrainingStopped
from inner.evaluate import evaluate, num_targets, sum_over_ranks, summed_loss
from inner.init import initialise
from inner.mesh import accumulation
from inner.model import Transformer
from inner.optim import build_optimizer, clip_gradients, lr_at
from inner.parallel.fsdp import reduce_on_backward, shard
from inner.params import LocalParams
from inner.presets import ModelSizes

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


class Trainer:
    """A model, its optimizer and its place in the learning-rate schedule. Every rank builds and steps one."""

    params: LocalParams
    inner_step: int
    """Inner steps done, skipped ones included; a joiner sets it to continue the schedule."""

    def __init__(
        self, sizes: ModelSizes, optimizer_config: OptimizerConfig, mesh: DeviceMesh, settings: TrainerSettings
    ) -> None:
        self.settings = settings
        self.num_data_ranks = mesh.size()
        self.data_rank = mesh.mesh.flatten().tolist().index(mesh.get_rank())
        self.inner_step = 0
        self._config = optimizer_config
        self._device = torch.device(settings.device)
        self._skipped_in_a_row = 0
        with torch.device("meta"):
            self.model = Transformer(sizes)
        shard(self.model, mesh, COMPUTE_DTYPES[settings.compute_dtype])
        self.model.to_empty(device=self._device)
        initialise(self.model, settings.seed)
        self.params = LocalParams(self.model)
        self._optimizer = build_optimizer(self.model, optimizer_config)

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches that step() wants of this rank. Raises InputError if the tokens do not divide."""
        return accumulation(
            self._config.tokens_per_step,
            self.settings.seq_len,
            self.settings.micro_batch,
            self.num_data_ranks,
        )

    def step(self, micro_batches: Sequence[Tensor]) -> StepResult:
        """One inner step on this rank's micro-batches (micro_batch, seq_len + 1), int64; target -100 is ignored.

        Every rank must call it with as many micro-batches. A non-finite loss or gradient anywhere skips the
        step everywhere; too many in a row raise TrainingStopped, everywhere too.
        """
        started_at = time.perf_counter()
        windows = [window.to(self._device) for window in micro_batches]
        tokens, num_windows = sum_over_ranks([sum(map(num_targets, windows)), len(windows)], self._device)
        assert num_windows == len(windows) * self.num_data_ranks > 0, f"{len(windows)} here, {num_windows} in all"
        my_loss = self._backward(windows, tokens)
        norm = clip_gradients(self.model, self._config.clip_norm)
        num_bad = float(not torch.isfinite(norm))
        # One rank's verdict is every rank's: what they add up to is the same everywhere.
        loss_sum, num_bad = sum_over_ranks([my_loss.item(), num_bad], self._device)
        is_skipped = tokens == 0 or num_bad > 0 or not math.isfinite(loss_sum)

        lr = lr_at(self.inner_step, self.settings.total_steps, self._config)
        if not is_skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.inner_step += 1
        self._guard(is_skipped, loss_sum)
        return StepResult(
            step=self.inner_step,
            tokens=int(tokens),
            loss=None if is_skipped else loss_sum / tokens,
            lr=lr,
            grad_norm=None if is_skipped else norm.item(),
            seconds=time.perf_counter() - started_at,
            is_skipped=is_skipped,
        )

    def evaluate(self, windows: Iterable[Tensor]) -> tuple[float, int]:
        """(loss in nats summed, tokens) over all ranks' windows. Every rank must call it with its own share."""
        return evaluate(self.model, windows, self._device)

    def _backward(self, windows: Sequence[Tensor], tokens: float) -> Tensor:
        """Adds up gradients of the island's mean loss; returns this rank's summed loss (0-dim)."""
        total = torch.zeros((), device=self._device)
        for number, window in enumerate(windows):
            reduce_on_backward(self.model, is_last=number == len(windows) - 1)
            loss = summed_loss(self.model, window)
            (loss / max(tokens, 1.0)).backward()
            total += loss.detach()
        return total

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
