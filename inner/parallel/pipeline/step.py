"""One training step of a pipeline. torch's schedules run a rank's stages over all micro-batches of
the step.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.pipelining.stage import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

from inner.config import Schedule
from inner.data.micro_batch import MicroBatch
from inner.model.transformer import Transformer
from inner.parallel.pipeline.evaluation import LocalStages, PipelineEvaluator, check_shapes
from inner.parallel.pipeline.stages import ONE_STAGE_PER_RANK, TORCH_NAMES
from inner.parallel.weights.compute_copies import ComputeCopies
from inner.parallel.weights.gradient_sync import keep_weights, one_backward, set_gradient_sync


class Pipeline:
    """This rank's stages, run by a schedule. Every rank of the pp group must build it and make each
    call.
    """

    def __init__(
        self,
        local: LocalStages,
        copies: ComputeCopies,
        schedule: Schedule,
        num_micro_batches: int,
        *,
        reduces_each: bool,
    ) -> None:
        """Build the stages and their schedule. `reduces_each`: as in OneStage."""
        self._copies = copies
        self._local = local
        self._num_micro_batches = num_micro_batches
        self._has_first = local.stages[0].stage.is_first
        self._has_last = any(model.stage.is_last for model in local.stages)
        self._scale = torch.ones(())
        self._forward_only = PipelineEvaluator(local)
        self._stages = stages = [
            _ReducingStage(model, local, copies, reduces_each) for model in local.stages
        ]
        kind: Any = get_schedule_class(TORCH_NAMES[schedule])
        mine = stages[0] if schedule in ONE_STAGE_PER_RANK else stages
        # Losses are scaled here: otherwise torch would divide the accumulated gradients by the
        # number of micro-batches again in every step.
        self._schedule = kind(mine, num_micro_batches, loss_fn=self._scaled, scale_grads=False)

    def backward(self, micro_batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """Accumulate gradients of `scale` (0-dim fp32) times the summed loss, and return the summed
        loss (0-dim fp32).

        Only the last stage's rank knows the loss; others return 0. The number of micro-batches must
        be the number that the pipeline was built for.
        """
        assert len(micro_batches) == self._num_micro_batches, (
            f"got {len(micro_batches)} micro-batches, need {self._num_micro_batches}"
        )
        check_shapes(micro_batches, self._local.stream)
        self._scale = scale
        # Concatenate the micro-batches, because the schedule splits its input again.
        tokens = torch.cat([batch.tokens_BS for batch in micro_batches])
        targets = torch.cat([batch.targets_BS for batch in micro_batches])
        for stage in self._stages:
            stage.micro_batches = micro_batches
        losses: list[Tensor] = []
        with self._copies:
            self._schedule.step(
                *([tokens] if self._has_first else []),
                # The last stage computes the loss from targets_BS, but the schedule requires a
                # target in any case.
                target=targets if self._has_last else None,
                losses=losses if self._has_last else None,
                return_outputs=False,
                # Each rank passes targets and tokens to its own stages; only the stream travels
                # between ranks.
                targets_BS=targets,
                tokens_BS=tokens,
            )
        self._copies.finish_gradients()
        return sum(losses, start=torch.zeros((), device=self._local.device)).detach() / scale

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the summed loss, as from backward(), of any number of micro-batches, without
        computing gradients.
        """
        with self._copies:
            return self._forward_only(micro_batches)

    def _scaled(self, loss: Tensor, _: Tensor) -> Tensor:
        return loss * self._scale


class _ReducingStage(PipelineStage):
    """torch's stage, except that it reduces gradients in the backward, as OneStage does, and passes
    documents, masks of dropout, and what extra depths predict to the model.

    torch would keep whole gradients until all micro-batches are done, and add up the gradients of
    split backwards in the compute dtype.
    """

    micro_batches: Sequence[MicroBatch]
    """Those of the step. Documents, masks of dropout, and what extra depths predict are no
    arguments, because the schedule could not split them.
    """

    def __init__(
        self, model: Transformer, local: LocalStages, copies: ComputeCopies, reduces_each: bool
    ) -> None:
        # Give the shapes to torch: it would otherwise infer them from a run that leaves gradients
        # behind.
        stream = local.stream
        stage = model.stage
        hidden = torch.empty(
            stream.micro_batch,
            stream.stream_positions,
            stream.dim,
            dtype=stream.dtype,
            device="meta",
        )
        tokens = torch.empty(stream.micro_batch, stream.positions, dtype=torch.int64, device="meta")
        super().__init__(
            model,
            stage.index,
            len(local.ranks),
            local.device,
            input_args=tokens if stage.is_first else hidden.clone().requires_grad_(),
            output_args=(
                torch.empty((), device="meta") if stage.is_last else hidden
            ).requires_grad_(),
            group=local.group,
        )
        self._model = model
        self._copies = copies
        self._reduces_each = reduces_each

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *options: Any,
        **more: Any,
    ) -> Any:
        """Run the forward of a micro-batch. torch calls it."""
        batch = self.micro_batches[fwd_chunk_id]
        complete = {**(kwargs or {}), "packing": batch.packing, "dropout": batch.dropout}
        if self.is_last:
            complete["ahead"] = batch.ahead
        return super().forward_one_chunk(fwd_chunk_id, args, complete, *options, **more)

    def backward_maybe_with_nosync(
        self,
        backward_type: Literal["full", "input", "weight"],
        bwd_kwargs: dict[str, Any],
        last_backward: bool = False,
    ) -> tuple[Any, Any]:
        """Run a backward, or one half of a split backward. torch calls it. Returns gradients of the
        inputs, and groups of parameters that the other half needs.
        """
        # Keep the weights here: the schedule frees them when the stage is done.
        keep_weights(self._model)
        self._copies.begin_backward(self._model, is_last=last_backward and backward_type != "input")
        reduces = backward_type != "input" and (last_backward or self._reduces_each)
        set_gradient_sync(self._model, over_shards=reduces, over_replicas=last_backward)
        output = bwd_kwargs["stage_output"]
        if backward_type == "full":
            return stage_backward(
                output, bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
            ), None
        with one_backward(self._model):
            weights = self._model.parameters()
            if backward_type == "input":
                return stage_backward_input(
                    output, bwd_kwargs["output_grads"], bwd_kwargs["input_values"], weights
                )
            gradients = stage_backward_weight(weights, bwd_kwargs["param_groups"])
        self._copies.add_gradients()
        return gradients, None
