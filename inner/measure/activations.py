"""What a forward pass keeps for the backward pass. In bytes of one rank; needs no torch.

Read off the saved tensors of inner/model.py: a change there belongs here. Numbers are kept in the compute dtype, but
for statistics, and but for norms on a CPU: there torch computes them in fp32, step by step, and keeps that.
"""

from dataclasses import dataclass

from inner.config import Recompute
from inner.measure.units import Workload

FP32 = 4
TOKEN_IDS = 16
"""Bytes of a position's token and target."""


@dataclass(frozen=True)
class Activations:
    """One micro-batch's, by what keeps them, on a kind of device."""

    work: Workload
    device_type: str

    def block(self, recompute: Recompute) -> int:
        """Of one layer."""
        if recompute == "full":
            return self.stream
        if recompute == "selective":
            return self.stream + self._products
        norms = 2 * self._norm(self.work.stream_tokens * self.work.sizes.dim, self.work.stream_tokens)
        outside = norms + 2 * self._inputs + 4 * self._hidden
        return outside if recompute == "attention" else outside + self._attention

    @property
    def stream(self) -> int:
        """The residual stream between two layers."""
        return self.work.compute_itemsize * self.work.stream_tokens * self.work.sizes.dim

    @property
    def head(self) -> int:
        """The last norm, but nothing of the loss."""
        return self._norm(self.work.stream_tokens * self.work.sizes.dim, self.work.stream_tokens)

    @property
    def token_ids(self) -> int:
        return TOKEN_IDS * self.work.tokens

    def backward(self, recompute: Recompute) -> int:
        """What one layer's backward holds at most beside all that was kept: what it computes again, and gradients."""
        again = self.block("none") - self.block(recompute)
        down = self.work.compute_itemsize * self.work.sizes.dim * -(-self.work.sizes.ffn_dim // self.work.degrees.tp)
        # At its worst before its second half, the feed-forward, has given back anything.
        first = 2 * self._hidden + self._inputs + down
        weights = self.work.compute_itemsize * self.work.block.numel
        second = again + 2 * self._inputs + weights - 4 * self._hidden - self._inputs
        return max(first + (0 if recompute == "attention" else again), second)

    @property
    def split_backward(self) -> int:
        """Between the two halves of one layer's split backward: gradients of what its matrices and norms give."""
        q_numel, kv_numel = self.work.q_numel, self.work.kv_numel
        heads = 2 * q_numel + 3 * kv_numel if self.work.sizes.qk_norm else q_numel + 2 * kv_numel
        return self.work.compute_itemsize * heads + 2 * self._hidden + 2 * self._inputs + 2 * self.stream

    @property
    def keeps_input(self) -> bool:
        """Whether a layer keeps its very input, and not an fp32 copy of it."""
        copies = self.device_type == "cpu" and self.work.compute_itemsize < FP32
        return not copies or self.work.parallel.recompute in ("selective", "full")

    @property
    def _inputs(self) -> int:
        """What a block's first matrices read: all positions, gathered under sequence parallel."""
        return self.work.compute_itemsize * self.work.tokens * self.work.sizes.dim

    @property
    def _hidden(self) -> int:
        """One number for each hidden unit of the feed-forward: gate, its SiLU, up, and their product are kept."""
        return self.work.compute_itemsize * self.work.tokens * -(-self.work.sizes.ffn_dim // self.work.degrees.tp)

    @property
    def _attention(self) -> int:
        """Queries, keys, values and the result; in fp32 the log of each row's sum of exponentials."""
        work = self.work
        per_head = 0
        if work.sizes.qk_norm:
            per_head = sum(self._norm(numel, numel // work.sizes.head_dim) for numel in (work.q_numel, work.kv_numel))
        # Ulysses: the attention's result, and the same after it was traded back.
        results = 2 if work.degrees.cp > 1 and work.parallel.context == "ulysses" else 1
        kept = (1 + results) * work.q_numel + 2 * work.kv_numel
        return per_head + work.compute_itemsize * kept + self._row_sums

    @property
    def _row_sums(self) -> int:
        return FP32 * self.work.q_numel // self.work.sizes.head_dim

    @property
    def _products(self) -> int:
        """Results of matrix products, attention kernels and collectives of tensor parallel: selective recompute."""
        work = self.work
        num_kernels = min(work.degrees.cp, 3) if work.parallel.context == "all_gather" else work.degrees.cp
        attention = num_kernels * (work.compute_itemsize * work.q_numel + self._row_sums)
        projections = work.compute_itemsize * (work.q_numel + 2 * work.kv_numel)
        # Of down and out projection; under tensor parallel also what is gathered before and scattered after each pair.
        outputs = 2 * self._inputs
        if work.degrees.tp > 1:
            outputs += 2 * (self._inputs + self.stream) if work.parallel.sequence_parallel else 2 * self._inputs
        return projections + attention + 2 * self._hidden + outputs

    def _norm(self, numel: int, rows: int) -> int:
        """Input and one statistic a row; on a CPU also the normed input, both in fp32."""
        if self.device_type == "cpu":
            return 2 * FP32 * numel + FP32 * rows
        return self.work.compute_itemsize * numel + FP32 * rows


@dataclass(frozen=True)
class LossMemory:
    """Of the head's cross-entropy, chunk by chunk, with the gradients that its forward makes."""

    kept: int
    """Between forward and backward: gradients of the head's input and of its table."""
    forward: int
    """While it computes: a chunk's logits, and the table's gradient in fp32. In backward there are two of `kept`."""


def loss_memory(work: Workload) -> LossMemory:
    """On the rank of the last stage, for one micro-batch."""
    itemsize = work.compute_itemsize
    rows = -(-work.sizes.vocab_size // work.degrees.tp)
    inputs, table = work.tokens * work.sizes.dim, rows * work.sizes.dim
    logits = min(work.parallel.loss_chunk, work.tokens) * rows
    # Below fp32 logits and probabilities exist in both dtypes at once, and so do the table's gradients.
    casts = itemsize if itemsize < FP32 else 0
    chunk = max((FP32 + casts) * logits, casts * (logits + table))
    kept = itemsize * (inputs + table)
    return LossMemory(kept=kept, forward=2 * itemsize * inputs + FP32 * table + chunk)
