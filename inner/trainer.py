"""Train one island's model. One call makes one inner step over all of the island's ranks."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from inner.config import OptimizerConfig, ParallelConfig
from inner.data.micro_batch import MicroBatch, empty_window, num_inputs_in, num_targets
from inner.errors import TrainingStopped
from inner.huggingface.load import load_weights
from inner.mesh import IslandMesh, accumulation_steps
from inner.model.balance import RoutedStep
from inner.model.buffers import saved_buffers
from inner.model.init import initialise
from inner.model.predict import mean_losses, recording_depths
from inner.model.sizes import ModelSizes, OwnModel
from inner.model.transformer import Transformer
from inner.optim.build import Rounding, build_optimizers
from inner.optim.clipping import clip_gradients, multiply_gradients, squared_norm
from inner.optim.expert_balance import ExpertBalance, RoutingResult
from inner.optim.gradients import sum_over_tensor_ranks, sum_tied
from inner.optim.learning_rate import lr_at, set_lr
from inner.optim.loss_scale import LossScale
from inner.optim.muon.orthogonalise import product_dtype
from inner.optim.noise_scale import (
    GradientNoise,
    estimate_noise,
    is_in_small_batch,
    without_targets,
)
from inner.optim.spikes import Spike, SpikeWatch
from inner.parallel.build import (
    Layout,
    StepShape,
    build_copies,
    build_cutter,
    build_dropout,
    build_runner,
    build_stages,
    build_tied_group,
    build_whole,
)
from inner.parallel.layout_check import check_layout
from inner.parallel.own_model import initialise_own_model
from inner.parallel.weights.fsdp import free_gathered_weights
from inner.params import LocalParams

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """Result of one inner step. All fields except `seconds` are the same on every rank."""

    step: int
    """Number of inner steps so far, including this one."""
    tokens: int
    """Number of valid targets over all ranks."""
    loss: float | None
    """Mean over those targets in nats; None if it or the gradient is not finite, or without any. A
    step whose scaled gradient overflows has a loss.
    """
    lr: float
    grad_norm: float | None
    """Gradient norm before clipping; None if it is not finite, or `loss` is None."""
    seconds: float
    is_skipped: bool
    """Whether the gradient was discarded, because it was not finite or the loss was a spike."""
    spike: Spike | None = None
    """The spike, if the loss is one."""
    noise: GradientNoise | None = None
    """The measured gradient noise; None in steps that do not measure it."""
    routing: RoutingResult | None = None
    """What the routers did; None for a model without experts."""
    depth_losses: tuple[float, ...] = ()
    """Mean loss of each extra depth of multi-token prediction over its own targets, in nats. Empty
    without such depths, and if `loss` is None."""
    loss_scale: float | None = None
    """The loss scale of the step; None unless the model computes in float16."""
    overflows: bool = False
    """Whether the step was skipped because its scaled gradient is too large for float16."""


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of a Trainer that belong neither to the model (ModelSizes) nor to the optimizer
    (OptimizerConfig).
    """

    device: str
    compute_dtype: str
    """float32, bfloat16 or float16. Master weights, gradient reduction and optimizer states are
    always fp32.
    """
    micro_batch: int
    """Number of sequences in one forward pass on one rank."""
    seq_len: int
    """Length of the longest sequences of the run."""
    seed: int
    total_steps: int
    """Number of inner steps of the whole run, which is the length of the learning-rate schedule."""
    eos_id: int | None = None
    """Token that ends a document, if attention must stay within documents. None: attention crosses
    documents.
    """
    first_seq_len: int | None = None
    """Length of the sequences of the first steps, until `enter_stage`. None: the longest."""
    init_from: Path | None = None
    """Folder with initial weights in Hugging Face's layout. None: they are drawn from the seed."""
    draw_weights: Callable[[LocalParams, Sequence[Transformer], int], None] = initialise
    """Function that draws the initial weights. Speed tests may replace it by one that is faster."""


class Trainer:
    """A model, its optimizers and its position in the schedule. Every rank builds and steps one."""

    model_parts: list[Transformer]
    """This rank's pipeline stages; the whole model when pp is 1."""
    inner_step: int
    """Number of inner steps so far, also skipped ones. A joining island sets it to the run's."""

    def __init__(
        self,
        model: ModelSizes | OwnModel,
        optimizer_config: OptimizerConfig,
        mesh: IslandMesh,
        parallel: ParallelConfig,
        settings: TrainerSettings,
    ) -> None:
        """Build or load the model. Raises InputError if the mesh, tokens_per_step or init_from does
        not fit it.
        """
        self.settings = settings
        self.mesh = mesh
        self.inner_step = 0
        self._config = optimizer_config
        self._seq_len = settings.first_seq_len or settings.seq_len
        self._device = torch.device(settings.device)
        self._skipped_in_a_row = 0
        self.broken_since: int | None = None
        """The inner step before the current series of non-finite steps; None after a finite
        step.
        """
        self.spikes = SpikeWatch(optimizer_config.spikes)
        self.loss_scale = LossScale() if settings.compute_dtype == "float16" else None
        """The scale of the next step's losses; None unless the model computes in float16."""
        self._splits_stream = parallel.splits_stream(mesh.degrees.tp)
        if isinstance(model, ModelSizes):
            check_layout(model, mesh.degrees, parallel, self._seq_len, self.micro_batches_per_step)
        dtype = COMPUTE_DTYPES[settings.compute_dtype]
        self._layout = layout = Layout(
            model, settings.seq_len, mesh, parallel, dtype, self._device, optimizer_config.z_loss
        )
        self.model_parts = build_stages(layout)
        whole = build_whole(layout)
        self.params = LocalParams(whole, self.model_parts)
        self.buffer_specs = [buffer.spec for buffer in saved_buffers([whole])]
        """The buffers of the whole model that training changes, see `inner.model.buffers`."""
        if isinstance(model, OwnModel):
            initialise_own_model(self.params, self.model_parts[0], settings.seed)
        elif settings.init_from is None:
            settings.draw_weights(self.params, self.model_parts, settings.seed)
        else:
            load_weights(self.params, self.model_parts, settings.init_from)
        names = [name for name, _ in whole.named_parameters()]
        muon_dtype = product_dtype(self._device.type, layout.compute_dtype)
        rounding = Rounding(self.params, settings.seed)
        self.optimizers = build_optimizers(
            self.model_parts, names, optimizer_config, muon_dtype, rounding
        )
        self._tied_ends = build_tied_group(layout)
        self._num_depths = model.num_depths if isinstance(model, ModelSizes) else 0
        self._balance: ExpertBalance | None = None
        if isinstance(model, ModelSizes) and model.experts is not None:
            self._balance = ExpertBalance(model, mesh, self.model_parts, self._sum)
        self._copies = build_copies(layout, self.model_parts)
        self._build_step()

    @property
    def data_rank(self) -> int:
        return self.mesh.data_rank

    @property
    def num_data_ranks(self) -> int:
        return self.mesh.degrees.num_data_ranks

    @property
    def micro_batches_per_step(self) -> int:
        """Number of micro-batches that step() expects on each rank."""
        return accumulation_steps(
            self._config.tokens_per_step,
            self._seq_len,
            self.settings.micro_batch,
            self.num_data_ranks,
        )

    def enter_stage(self, seq_len: int, optimizer_config: OptimizerConfig) -> None:
        """Use sequences of length `seq_len` and the config's lr and tokens per step from now on.

        The settings' `seq_len` is the limit. All ranks must call it between the same two steps.
        Raises InputError if the mesh cannot run such steps.
        """
        assert seq_len <= self.settings.seq_len, (
            f"seq_len {seq_len} is above the longest, {self.settings.seq_len}"
        )
        before = self._step_shape
        self._seq_len = seq_len
        self._config = optimizer_config
        if self._step_shape == before:
            return
        layout = self._layout
        if isinstance(layout.model, ModelSizes):
            degrees = self.mesh.degrees
            check_layout(
                layout.model, degrees, layout.parallel, seq_len, self.micro_batches_per_step
            )
        self._build_step()

    def _build_step(self) -> None:
        """Build what depends on the shape of a step: the cutter, RoPE's table, and the runner with
        its schedule and receive buffers. Every rank must call it.
        """
        layout = self._layout
        self._cutter = build_cutter(layout, self._seq_len, self.settings.eos_id)
        self._dropout = build_dropout(
            layout, self._config.dropout, self.settings.seed, self._seq_len
        )
        if isinstance(layout.model, ModelSizes):
            for stage in self.model_parts:
                stage.set_positions(layout.positions_at(self._seq_len))
        self._runner = build_runner(layout, self.model_parts, self._copies, self._step_shape)

    @property
    def _step_shape(self) -> StepShape:
        return StepShape(self.settings.micro_batch, self._seq_len, self.micro_batches_per_step)

    def step(self, micro_batches: Sequence[Tensor]) -> StepResult:
        """Make one inner step on int64 micro-batches (micro_batch, seq_len + 1) on the CPU.

        Targets of -100 are ignored. Every rank must call it with the same number of micro-batches,
        and ranks with equal data_rank with the same ones. A non-finite loss or gradient on any rank
        skips the step on all ranks; too many such steps in a row raise TrainingStopped on all
        ranks. A loss spike may also skip the step, see SpikeConfig. In float16, a non-finite
        gradient of a finite loss is an overflow, see LossScale.
        """
        started_at = time.perf_counter()
        assert len(micro_batches) == self.micro_batches_per_step, (
            f"{len(micro_batches)} micro-batches"
        )
        small = self._measure_small_batch(micro_batches) if self._measures_noise() else None
        num_tokens = self._sum(self._counted_tokens(micro_batches))
        depths = recording_depths(self.model_parts, self._num_depths, self._device)
        with self._record_routing(micro_batches) as routed, depths as depth_sums_2P:
            my_loss = self._backward(self._cut(micro_batches), num_tokens)
        routing = None if self._balance is None or routed is None else self._balance.gather(routed)
        mine = torch.stack([self._counted_loss(my_loss), squared_norm(self.model_parts)])
        sums = self._sum(torch.cat((mine, self._counted_loss(depth_sums_2P).flatten())))
        # The host waits for the device only here. All ranks see the same sums, so all decide alike.
        loss_sum, norm_2, *of_depths, tokens = torch.stack((*sums, num_tokens)).tolist()
        has_loss = tokens > 0 and math.isfinite(loss_sum)
        has_gradient = has_loss and math.isfinite(norm_2)
        overflows = self.loss_scale is not None and has_loss and not has_gradient
        is_broken = not (has_gradient or overflows)
        spike = None if is_broken else self.spikes.observe(loss_sum / tokens)
        is_skipped = not has_gradient or (spike is not None and spike.action != "note")

        lr = lr_at(self.inner_step, self.settings.total_steps, self._config)
        if not is_skipped:
            self._update(lr, math.sqrt(norm_2))
            if self._balance is not None and routing is not None:
                self._balance.move_biases(routing, self._config.balance.bias_speed)
        self._zero_gradients()
        self.inner_step += 1
        self._count_broken(
            is_broken, loss_sum, routing.broken_layers if routing is not None else ()
        )
        loss_scale = None if self.loss_scale is None else self.loss_scale.value
        if has_loss:
            self._move_loss_scale(overflows=overflows)
        is_measured = (
            small is not None and has_gradient and 0 < small[0] < tokens and math.isfinite(small[1])
        )
        return StepResult(
            step=self.inner_step,
            tokens=int(tokens),
            loss=None if is_broken else loss_sum / tokens,
            lr=lr,
            grad_norm=math.sqrt(norm_2) if has_gradient else None,
            seconds=time.perf_counter() - started_at,
            is_skipped=is_skipped,
            spike=spike,
            noise=estimate_noise(small, (tokens, norm_2))
            if small is not None and is_measured
            else None,
            routing=routing,
            depth_losses=() if is_broken else mean_losses(of_depths),
            loss_scale=loss_scale,
            overflows=overflows,
        )

    def evaluate(self, windows: Iterable[Tensor]) -> tuple[float, int]:
        """Return the summed loss in nats and the number of tokens over all ranks' windows.

        Every rank must call it, and ranks with equal data_rank with the same windows. The number of
        windows may differ between data ranks and may be zero. The training state is unchanged.
        """
        here = list(windows)
        most = torch.tensor(len(here), device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        # A forward is collective, so all ranks must run the same number of forwards.
        empty = empty_window(self.settings.micro_batch, self._seq_len)
        padded = here + [empty] * (int(most) - len(here))
        my_loss = self._counted_loss(self._runner.evaluate(list(map(self._cutter, padded))))
        for stage in self.model_parts:
            free_gathered_weights(stage)
        loss_sum, tokens = self._sum(
            torch.stack([my_loss.double(), self._counted_tokens(here)])
        ).tolist()
        return loss_sum, int(tokens)

    def _backward(self, batches: list[MicroBatch], num_tokens: Tensor) -> Tensor:
        """Compute the gradient of the mean loss over all targets. Return this rank's summed
        loss.
        """
        my_loss = self._runner.backward(
            batches, (self._loss_factor / num_tokens.clamp(min=1.0)).float()
        )
        self._sum_gradients()
        if self.loss_scale is not None:
            multiply_gradients(self.model_parts, 1.0 / self._loss_factor)
        return my_loss

    @property
    def _loss_factor(self) -> float:
        """The factor of all losses in a backward."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def _move_loss_scale(self, *, overflows: bool) -> None:
        """Count a step with a finite loss. Raises TrainingStopped if the lowest scale is too
        large.
        """
        if self.loss_scale is None:
            return
        try:
            self.loss_scale.observe(overflows=overflows)
        except TrainingStopped as stopped:
            # The same weights overflow since then: a state of these steps is none to go back to.
            self.broken_since = self.inner_step - self.loss_scale.num_overflows
            raise TrainingStopped(f"inner step {self.inner_step}: {stopped}") from None

    def _record_routing(
        self, micro_batches: Sequence[Tensor]
    ) -> AbstractContextManager[RoutedStep | None]:
        """Return a context in which the routers record a step. It is collective for a model with
        experts.
        """
        if self._balance is None:
            return nullcontext()
        num_tokens = self._counted(micro_batches, num_inputs_in)
        return self._balance.recording(self._config.balance, num_tokens, self._loss_factor)

    def _cut(self, micro_batches: Sequence[Tensor]) -> list[MicroBatch]:
        """Cut the micro-batches of the next training step, with their masks of dropout."""
        batches = list(map(self._cutter, micro_batches))
        if self._dropout is None:
            return batches
        numbers = self._number_sequences(len(batches))
        masks = [self._dropout.of_micro_batch(self.inner_step, each) for each in numbers]
        return [batch._replace(dropout=each) for batch, each in zip(batches, masks, strict=True)]

    def _number_sequences(self, num_micro_batches: int) -> list[range]:
        """Return the numbers of each micro-batch's sequences in the step over all ranks."""
        count = self.settings.micro_batch
        first = self.data_rank * num_micro_batches
        return [
            range(count * number, count * (number + 1))
            for number in range(first, first + num_micro_batches)
        ]

    def _measures_noise(self) -> bool:
        every = self._config.noise_scale_every
        return every > 0 and self.inner_step % every == 0

    def _measure_small_batch(self, micro_batches: Sequence[Tensor]) -> tuple[float, float]:
        """Return number of targets and squared norm of the mean gradient of the step's small batch.

        It runs over all sequences, with targets in the small batch only, which is the same on every
        mesh. It leaves no gradient and does not change a later backward. Every rank must call it.
        """
        numbers = self._number_sequences(len(micro_batches))
        keeps = [is_in_small_batch(each[0], len(each)) for each in numbers]
        kept = [window[chosen] for window, chosen in zip(micro_batches, keeps, strict=True)]
        num_tokens = self._sum(self._counted_tokens(kept))
        batches = self._cut(micro_batches)
        self._backward(
            [without_targets(*each) for each in zip(batches, keeps, strict=True)], num_tokens
        )
        square = self._sum(squared_norm(self.model_parts))
        self._zero_gradients()
        return float(num_tokens), float(square)

    def _zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _counted_tokens(self, windows: Sequence[Tensor]) -> Tensor:
        """Return the number of valid targets on one of the ranks with the same windows, else 0."""
        return self._counted(windows, num_targets)

    def _counted(self, windows: Sequence[Tensor], count_of: Callable[[Tensor], int]) -> Tensor:
        """Return a count over the windows on one of the ranks that have the same, else 0.

        It is counted on the CPU and written on the device (0-dim fp64), so that neither waits.
        """
        at = self.mesh.at
        count = sum(map(count_of, windows)) if at["pp"] == at["cp"] == at["tp"] == 0 else 0
        return torch.full((), float(count), dtype=torch.float64, device=self._device)

    def _counted_loss(self, loss: Tensor) -> Tensor:
        """Return the loss on the first tensor-parallel rank and 0 on others, to count it once."""
        return loss if self.mesh.at["tp"] == 0 else torch.zeros_like(loss)

    def _sum(self, values: Tensor) -> Tensor:
        """Sum each value over the island's ranks in fp64, on the device. Every rank must call
        it.
        """
        total = values.double()
        # With a single rank, gloo would take a millisecond for nothing.
        if self.mesh.degrees.num_ranks > 1:
            dist.all_reduce(total)
        return total

    def _sum_gradients(self) -> None:
        """Add up the parts of a weight's gradient that different ranks or stages have computed."""
        sum_tied(self.model_parts, self._tied_ends)
        if self.mesh.degrees.tp > 1:
            group = self.mesh.tp.get_group()
            sum_over_tensor_ranks(self.model_parts, group, splits_stream=self._splits_stream)

    def _update(self, lr: float, norm: float) -> None:
        """Clip the gradients and step the optimizers. `norm` is the gradient norm over the whole
        mesh.
        """
        clip_gradients(self.model_parts, norm, self._config.clip_norm)
        set_lr(self.optimizers, lr)
        for optimizer in self.optimizers:
            optimizer.step()

    def lower_loss_scale(self, exponent: int | None) -> None:
        """Continue with this loss scale, a logarithm to base 2, if it is smaller. Every rank must
        call it.
        """
        if self.loss_scale is not None:
            self.loss_scale.lower(exponent)

    def go_on_after_broken_steps(self, inner_step: int) -> None:
        """Continue at this inner step with an earlier state, because losses were not finite."""
        self.inner_step = inner_step
        self._skipped_in_a_row = 0
        self.broken_since = None

    def _count_broken(self, is_broken: bool, loss_sum: float, routers: tuple[int, ...]) -> None:
        """Count consecutive non-finite steps. Raises TrainingStopped if there are too many.

        `routers`: layers whose router was not finite.
        """
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if is_broken else 0
        if not is_broken:
            self.broken_since = None
        elif self.broken_since is None:
            self.broken_since = self.inner_step - 1
        if self._skipped_in_a_row > self._config.max_skipped_steps:
            what = "loss" if not math.isfinite(loss_sum) else "gradient"
            where = (
                f" (the first router that was not finite is that of layer {routers[0]})"
                if routers
                else ""
            )
            raise TrainingStopped(
                f"inner step {self.inner_step}: {self._skipped_in_a_row} steps in a row had a "
                f"non-finite {what} or no valid target{where}, optimizer.max_skipped_steps allows "
                f"{self._config.max_skipped_steps}; lower optimizer.lr, lengthen "
                "optimizer.warmup_steps, or look at the data"
            )
