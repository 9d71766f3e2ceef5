"""Memory of the activations that a forward pass keeps for the backward pass, in bytes per rank. No
torch here.

The figures follow the saved tensors of inner/model/transformer.py, so a change there needs a change
here. Values are kept in the compute dtype. Exceptions are statistics, and norms on a CPU, which
torch computes step by step in fp32.
"""

from dataclasses import dataclass

from inner.config import Recompute
from inner.measure.workload import Workload

FP32 = 4
TOKEN_IDS = 16
"""Bytes of the input token and the target of a position."""


@dataclass(frozen=True)
class ActivationMemory:
    """Activations of one micro-batch, by the part of the model that keeps them, on one type of
    device.
    """

    work: Workload
    device_type: str

    def block(self, recompute: Recompute) -> int:
        """Return the bytes of one layer's activations."""
        if recompute == "full":
            return self.stream
        if recompute == "selective":
            return self.stream + self._products
        outside = 2 * self.stream_norm + 2 * self._inputs + 4 * self._hidden
        return outside if recompute == "attention" else outside + self._attention

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between two layers."""
        return self.work.compute_itemsize * self.work.stream_tokens * self.work.sizes.dim

    @property
    def stream_norm(self) -> int:
        """Bytes that one norm of the residual stream keeps."""
        return self._norm(self.work.stream_tokens * self.work.sizes.dim, self.work.stream_tokens)

    def backward(self, recompute: Recompute) -> int:
        """Return the peak of one layer's backward in addition to the kept activations: recomputed
        activations and gradients.
        """
        recomputed = self.block("none") - self.block(recompute)
        down = self.work.compute_itemsize * self.work.sizes.dim * -(-self.work.sizes.ffn_dim // self.work.degrees.tp)
        # The first peak is in the feed-forward, which comes first in the backward, when nothing has
        # been freed yet.
        first = 2 * self._hidden + self._inputs + down
        weights = self.work.compute_itemsize * self.work.block.numel
        second = recomputed + 2 * self._inputs + weights - 4 * self._hidden - self._inputs
        return max(first + (0 if recompute == "attention" else recomputed), second)

    @property
    def split_backward(self) -> int:
        """Bytes held between the halves of one layer's split backward: gradients of the outputs of
        its matrices and norms.
        """
        q_numel = self.work.q_numel
        kv_numel = self.work.kv_numel
        heads = 2 * q_numel + 3 * kv_numel if self.work.sizes.qk_norm else q_numel + 2 * kv_numel
        return self.work.compute_itemsize * heads + 2 * self._hidden + 2 * self._inputs + 2 * self.stream

    @property
    def keeps_input(self) -> bool:
        """Whether a layer keeps its input itself instead of an fp32 copy."""
        copies = self.device_type == "cpu" and self.work.compute_itemsize < FP32
        return not copies or self.work.parallel.recompute in ("selective", "full")

    @property
    def _inputs(self) -> int:
        """Bytes of the input of a block's first matrices, at all positions. Sequence parallelism
        gathers them.
        """
        return self.work.compute_itemsize * self.work.tokens * self.work.sizes.dim

    @property
    def _hidden(self) -> int:
        """Bytes of one hidden tensor of the feed-forward, which keeps four: gate, its SiLU, up, and
        their product.
        """
        return self.work.compute_itemsize * self.work.tokens * -(-self.work.sizes.ffn_dim // self.work.degrees.tp)

    @property
    def _attention(self) -> int:
        """Bytes of queries, keys, values and the result, and of the log-sum-exp of each row in
        fp32.
        """
        work = self.work
        per_head = 0
        if work.sizes.qk_norm:
            per_head = sum(self._norm(numel, numel // work.sizes.head_dim) for numel in (work.q_numel, work.kv_numel))
        # Ulysses keeps the result of attention both before and after the exchange.
        results = 2 if work.degrees.cp > 1 and work.parallel.context == "ulysses" else 1
        numel = (1 + results) * work.q_numel + 2 * work.kv_numel
        return per_head + work.compute_itemsize * numel + self._row_sums

    @property
    def _row_sums(self) -> int:
        return FP32 * self.work.q_numel // self.work.sizes.head_dim

    @property
    def _products(self) -> int:
        """Bytes that selective recomputation keeps: results of matrix products, attention kernels
        and tp collectives.
        """
        work = self.work
        num_kernels = min(work.degrees.cp, 3) if work.parallel.context == "all_gather" else work.degrees.cp
        attention = num_kernels * (work.compute_itemsize * work.q_numel + self._row_sums)
        projections = work.compute_itemsize * (work.q_numel + 2 * work.kv_numel)
        # These are the results of the down and out projections. Tensor parallelism adds a gather
        # before and a scatter after each pair of matrices.
        outputs = 2 * self._inputs
        if work.degrees.tp > 1:
            outputs += 2 * (self._inputs + self.stream) if work.parallel.sequence_parallel else 2 * self._inputs
        return projections + attention + 2 * self._hidden + outputs

    def _norm(self, numel: int, rows: int) -> int:
        """Return the bytes of a norm's input and one statistic per row. On a CPU both are fp32, and
        the normed input is added.
        """
        if self.device_type == "cpu":
            return 2 * FP32 * numel + FP32 * rows
        return self.work.compute_itemsize * numel + FP32 * rows


@dataclass(frozen=True)
class LossMemory:
    """Memory of the chunked cross-entropy, whose forward already computes gradients, in bytes."""

    kept: int
    """Gradients of the head's input and of its table. They are held until the backward, during
    which two copies exist."""
    forward: int
    """Peak of the forward: the logits of a chunk, and the gradient of the table in fp32."""


def loss_memory(work: Workload) -> LossMemory:
    """Return the memory of the loss of one micro-batch on the rank of the last stage."""
    itemsize = work.compute_itemsize
    rows = -(-work.sizes.vocab_size // work.degrees.tp)
    inputs = work.tokens * work.sizes.dim
    table = rows * work.sizes.dim
    logits = min(work.parallel.loss_chunk, work.tokens) * rows
    # In a dtype smaller than fp32, logits and probabilities exist in both dtypes at once, and so do
    # the gradients of the table.
    casts = itemsize if itemsize < FP32 else 0
    chunk = max((FP32 + casts) * logits, casts * (logits + table))
    return LossMemory(kept=itemsize * (inputs + table), forward=2 * itemsize * inputs + FP32 * table + chunk)
