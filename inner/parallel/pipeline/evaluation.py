"""Forward pass over pipeline stages without gradients. torch has no such schedule for stages laid
out as a V.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from inner.data.micro_batch import MicroBatch
from inner.model.transformer import Transformer


@dataclass(frozen=True)
class StreamShape:
    """Shape of the stream between stages: (micro_batch, stream_positions, dim) in the compute
    dtype.
    """

    micro_batch: int
    positions: int
    """Positions of the input tokens on this rank."""
    stream_positions: int
    """Positions of the residual stream on this rank; fewer with sequence parallelism."""
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LocalStages:
    """The pipeline stages of this rank and the ranks of all stages."""

    stages: Sequence[Transformer]
    ranks: Sequence[int]
    """The coordinate on `pp` of each stage of the model."""
    group: dist.ProcessGroup
    stream: StreamShape
    device: torch.device


def check_shapes(micro_batches: Sequence[MicroBatch], stream: StreamShape) -> None:
    """Assert that micro-batches have the agreed shape. With another shape, the receiving ranks
    would hang or crash.
    """
    expected = stream.micro_batch, stream.positions
    for micro_batch in micro_batches:
        got = tuple(micro_batch.tokens_BS.shape)
        assert got == expected, f"a pipeline was built for micro-batches of {expected}, got {got}"


class PipelineEvaluator:
    """Evaluates by running each of this rank's stages over all micro-batches before the next
    stage.
    """

    def __init__(self, local: LocalStages) -> None:
        self._local = local
        self._me = dist.get_rank(local.group)
        self._kept: dict[int, list[Tensor]] = {}
        """Outputs of each stage whose next stage is also on this rank."""
        self._sends: list[tuple[dist.Work, Tensor]] = []

    @torch.no_grad()
    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Return the summed loss (0-dim fp32) on the last stage's rank, 0 on others. Every rank of
        the group must call it.
        """
        check_shapes(micro_batches, self._local.stream)
        total = torch.zeros((), device=self._local.device)
        for model in self._local.stages:
            outputs = self._run(model, micro_batches)
            if model.stage.is_last:
                total += torch.stack(list(outputs)).sum() if micro_batches else 0.0
            else:
                self._pass_on(model.stage.index, outputs)
        for work, _ in self._sends:
            work.wait()
        self._kept.clear()
        self._sends.clear()
        return total

    def _run(self, model: Transformer, micro_batches: Sequence[MicroBatch]) -> Iterator[Tensor]:
        for number, micro_batch in enumerate(micro_batches):
            x = (
                micro_batch.tokens_BS
                if model.stage.is_first
                else self._input(model.stage.index, number)
            )
            tokens_BS = micro_batch.tokens_BS
            yield model(
                x,
                targets_BS=micro_batch.targets_BS,
                packing=micro_batch.packing,
                tokens_BS=tokens_BS,
            )

    def _input(self, stage: int, number: int) -> Tensor:
        source = self._local.ranks[stage - 1]
        if source == self._me:
            return self._kept[stage - 1][number]
        stream = self._local.stream
        shape = stream.micro_batch, stream.stream_positions, stream.dim
        x_BSD = torch.empty(shape, dtype=stream.dtype, device=self._local.device)
        dist.recv(x_BSD, group=self._local.group, group_src=source)
        return x_BSD

    def _pass_on(self, stage: int, outputs: Iterator[Tensor]) -> None:
        target = self._local.ranks[stage + 1]
        if target == self._me:
            self._kept[stage] = list(outputs)
            return
        if stage > 0 and self._local.ranks[stage - 1] == target:
            # Compute all outputs before the first send: NCCL orders both directions of a pair
            # together, and the other rank sends all of its outputs before it receives.
            outputs = iter(list(outputs))
        for output in outputs:
            work = dist.isend(output.contiguous(), group=self._local.group, group_dst=target)
            assert work is not None, "this rank must be in the group"
            self._sends.append((work, output))
