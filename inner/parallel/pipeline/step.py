"""Pipeline parallelism on torch's schedules: a rank's stages, run over all micro-batches of a step at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from inner.config import Schedule
from inner.model import Transformer
from inner.parallel.forward import ForwardOnly, LocalStages, check_shapes
from inner.parallel.stages import TORCH_NAMES
from inner.windows import MicroBatch


class Pipeline:
    """The stages of this rank and their schedule. Every rank of the pp group must build it and make each call."""

    def __init__(self, here: LocalStages, schedule: Schedule, num_micro_batches: int) -> None:
        self._here = here
        self._num_micro_batches = num_micro_batches
        self._has_first = here.parts[0].stage.is_first
        self._has_last = any(part.stage.is_last for part in here.parts)
        self._scale = 1.0
        self._forward_only = ForwardOnly(here)
        stages = [_stage(part, here) for part in here.parts]
        kind = get_schedule_class(TORCH_NAMES[schedule])
        # torch would divide gradients by the number of micro-batches, each step again; losses are scaled here.
        if issubclass(kind, PipelineScheduleSingle):
            self._schedule = kind(stages[0], num_micro_batches, loss_fn=self._scaled, scale_grads=False)
        else:
            assert issubclass(kind, PipelineScheduleMulti)
            self._schedule = kind([*stages], num_micro_batches, loss_fn=self._scaled, scale_grads=False)

    def backward(self, micro_batches: Sequence[MicroBatch], scale: float) -> Tensor:
        """Adds up gradients of `scale` times the summed loss; returns that loss (0-dim fp32), 0 where it is not known.

        The last stage's rank knows it. Wants exactly the micro-batches it was built for, all of one shape.
        """
        assert len(micro_batches) == self._num_micro_batches, f"{len(micro_batches)}, not {self._num_micro_batches}"
        check_shapes(micro_batches, self._here.stream)
        self._scale = scale
        tokens, targets, documents = (_together(column) for column in zip(*micro_batches, strict=True))
        # Every stage gets its own from here; only the stream travels.
        stage_inputs: dict[str, Any] = {"targets_BS": targets}
        if documents is not None:
            stage_inputs["documents_BS"] = documents
        losses: list[Tensor] = []
        self._schedule.step(
            *([tokens] if self._has_first else []),
            # The last stage's module computes the loss from its own targets; the schedule wants some to hand on.
            target=targets if self._has_last else None,
            losses=losses if self._has_last else None,
            return_outputs=False,
            **stage_inputs,
        )
        return sum(losses, start=torch.zeros((), device=self._here.device)).detach() / scale

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The summed loss (0-dim fp32) of any number of micro-batches, without gradients; else as backward()."""
        return self._forward_only(micro_batches)

    def _scaled(self, loss: Tensor, _: Tensor) -> Tensor:
        return loss * self._scale


def _together(column: Sequence[Tensor | None]) -> Tensor | None:
    """One tensor of all micro-batches: the schedule cuts it again."""
    tensors = [tensor for tensor in column if tensor is not None]
    return torch.cat(tensors) if tensors else None


def _stage(part: Transformer, here: LocalStages) -> PipelineStage:
    """Shapes are said beforehand: torch would find them by running a micro-batch, which leaves gradients behind."""
    stream, stage = here.stream, part.stage
    hidden = torch.empty(stream.micro_batch, stream.stream_positions, stream.dim, dtype=stream.dtype, device="meta")
    tokens = torch.empty(stream.micro_batch, stream.positions, dtype=torch.int64, device="meta")
    loss = torch.empty((), device="meta")
    return PipelineStage(
        part,
        stage.index,
        len(here.ranks),
        here.device,
        input_args=tokens if stage.is_first else hidden.clone().requires_grad_(),
        output_args=loss.requires_grad_() if stage.is_last else hidden.requires_grad_(),
        group=here.group,
    )
