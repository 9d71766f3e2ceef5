"""A forward pass over pipeline stages, without gradients: torch's schedules know none for stages laid out as a V."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from inner.model import Transformer
from inner.windows import MicroBatch


@dataclass(frozen=True)
class StreamShape:
    """What travels between stages: (micro_batch, positions of this rank, dim) in the dtype of computing."""

    micro_batch: int
    positions: int
    """Of the tokens that go in."""
    stream_positions: int
    """Of the residual stream; fewer under sequence parallel."""
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class LocalStages:
    """The pipeline stages of this rank, and where the others are."""

    parts: Sequence[Transformer]
    ranks: Sequence[int]
    """The coordinate on `pp` of each stage of the model."""
    group: dist.ProcessGroup
    """Of pp."""
    stream: StreamShape
    device: torch.device


def check_shapes(micro_batches: Sequence[MicroBatch], stream: StreamShape) -> None:
    """Other shapes than those agreed on would hang or kill the ranks that wait for them."""
    agreed = stream.micro_batch, stream.positions
    for micro_batch in micro_batches:
        got = tuple(micro_batch.tokens_BS.shape)
        assert got == agreed, f"a pipeline was built for micro-batches of {agreed}, got {got}"


class ForwardOnly:
    """This rank's stages, each run over all micro-batches before the next."""

    def __init__(self, here: LocalStages) -> None:
        self._here = here
        self._me = dist.get_rank(here.group)
        self._kept: dict[int, list[Tensor]] = {}
        """Outputs of a stage whose next one is here, too."""
        self._sends: list[tuple[dist.Work, Tensor]] = []

    @torch.no_grad()
    def __call__(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """The summed loss (0-dim fp32) on the last stage's rank, else 0. Every rank of the group must call it."""
        check_shapes(micro_batches, self._here.stream)
        total = torch.zeros((), device=self._here.device)
        for part in self._here.parts:
            outputs = self._run(part, micro_batches)
            if part.stage.is_last:
                total += torch.stack(list(outputs)).sum() if micro_batches else 0.0
            else:
                self._pass_on(part.stage.index, outputs)
        for work, _ in self._sends:
            work.wait()
        self._kept.clear()
        self._sends.clear()
        return total

    def _run(self, part: Transformer, micro_batches: Sequence[MicroBatch]) -> Iterator[Tensor]:
        for number, micro_batch in enumerate(micro_batches):
            x = micro_batch.tokens_BS if part.stage.is_first else self._input(part.stage.index, number)
            yield part(x, targets_BS=micro_batch.targets_BS, documents_BS=micro_batch.documents_BS)

    def _input(self, stage: int, number: int) -> Tensor:
        source = self._here.ranks[stage - 1]
        if source == self._me:
            return self._kept[stage - 1][number]
        stream = self._here.stream
        shape = stream.micro_batch, stream.stream_positions, stream.dim
        x_BSD = torch.empty(shape, dtype=stream.dtype, device=self._here.device)
        dist.recv(x_BSD, group=self._here.group, group_src=source)
        return x_BSD

    def _pass_on(self, stage: int, outputs: Iterator[Tensor]) -> None:
        target = self._here.ranks[stage + 1]
        if target == self._me:
            self._kept[stage] = list(outputs)
            return
        if stage > 0 and self._here.ranks[stage - 1] == target:
            # NCCL keeps one order for both directions of a pair, and the other side sends all before it receives.
            outputs = iter(list(outputs))
        for output in outputs:
            work = dist.isend(output.contiguous(), group=self._here.group, group_dst=target)
            assert work is not None, "this rank is in the group"
            self._sends.append((work, output))
