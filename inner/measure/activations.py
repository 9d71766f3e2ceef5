"""Memory of the activations that a forward pass keeps for the backward pass, in bytes per rank. No
torch here.

Values are kept in the compute dtype. Exceptions are statistics, what a router and the sum over a
token's experts need, and norms on a CPU, which torch computes step by step in fp32.
"""

from dataclasses import dataclass

from inner.config import Recompute
from inner.measure.block_activations import (
    HalfMemory,
    attention_memory,
    feed_forward_memory,
    input_bytes,
    kept_choices,
    norm_bytes,
)
from inner.measure.workload import FP32, Workload

TOKEN_IDS = 16
"""Bytes of the input token and the target of a position."""


@dataclass(frozen=True)
class ActivationMemory:
    """Activations of one micro-batch, by the part of the model that keeps them, on one type of
    device.
    """

    work: Workload
    device_type: str

    def block(self, recompute: Recompute, has_experts: bool = False) -> int:
        """Return the bytes of one layer's activations."""
        feed_forward = self._feed_forward(has_experts)
        if recompute == "full":
            return self.stream + (kept_choices(self.work) if has_experts else 0)
        if recompute == "selective":
            return (
                self.stream
                + self._attention.products
                + feed_forward.products
                + self._gathered(has_experts)
            )
        outside = self._outside_halves + feed_forward.kept
        return outside if recompute == "attention" else outside + self._attention.kept

    @property
    def _outside_halves(self) -> int:
        """Return the bytes that a layer keeps for its norms, and the input of attention."""
        decoder = self.work.sizes.decoder
        inputs = input_bytes(self.work)
        if decoder.parallel == "one_norm":
            # Attention and feed-forward have the same input, which counts with the latter.
            return self.stream_norm if self.work.degrees.tp == 1 else self.stream_norm + inputs
        # The two norms of a parallel block have the same input, unless each keeps an fp32 copy of
        # it.
        is_copied = (
            self.device_type == "cpu"
            and self.work.compute_itemsize < FP32
            and not decoder.has_layer_norm
        )
        shared = self.stream * (decoder.parallel == "two_norms" and not is_copied)
        return decoder.num_norms * self.stream_norm + inputs - shared

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between two layers."""
        return self.work.compute_itemsize * self.work.stream_tokens * self.work.sizes.dim

    @property
    def stream_norm(self) -> int:
        """Bytes that one norm of the residual stream keeps."""
        tokens = self.work.stream_tokens
        return norm_bytes(self.work, self.device_type, tokens * self.work.sizes.dim, tokens)

    @property
    def joint(self) -> int:
        """Bytes that the block of an extra depth keeps beside those of a layer: the embedded
        tokens, and unless they are recomputed three norms and the input of their matrix, which is
        twice as wide.
        """
        if self.work.parallel.recompute in ("selective", "full"):
            return self.stream
        return 3 * self.stream_norm + 2 * self.stream

    def backward(self, recompute: Recompute, has_experts: bool = False) -> int:
        """Return the peak of one layer's backward in addition to the kept activations: recomputed
        activations and gradients.
        """
        feed_forward = self._feed_forward(has_experts)
        recomputed = self.block("none", has_experts) - self.block(recompute, has_experts)
        # The first peak is in the feed-forward, which comes first in the backward, when nothing has
        # been freed yet.
        first = feed_forward.backward + (0 if recompute == "attention" else recomputed)
        weights = self.work.compute_bytes(self.work.layer_groups(has_experts))
        second = recomputed + self._attention.backward + weights - feed_forward.kept
        return max(first, second)

    def split_backward(self, has_experts: bool = False) -> int:
        """Return the bytes held between the halves of one layer's split backward: gradients of the
        outputs of its matrices and norms.
        """
        return self._attention.outputs + self._feed_forward(has_experts).outputs + 2 * self.stream

    @property
    def keeps_input(self) -> bool:
        """Whether a layer keeps its input itself instead of an fp32 copy."""
        copies = self.device_type == "cpu" and self.work.compute_itemsize < FP32
        return not copies or self.work.parallel.recompute in ("selective", "full")

    @property
    def _attention(self) -> HalfMemory:
        return attention_memory(self.work, self.device_type)

    def _feed_forward(self, has_experts: bool) -> HalfMemory:
        return feed_forward_memory(self.work, has_experts)

    def _gathered(self, has_experts: bool) -> int:
        """Return the bytes of the stream that selective recomputation keeps, because tensor
        parallelism gathers it before each pair of matrices, and scatters it after.
        """
        work = self.work
        if work.degrees.tp == 1:
            return 0
        inputs = input_bytes(work)
        pairs = work.num_matrix_pairs(has_experts)
        if work.parallel.splits_stream(work.degrees.tp):
            return pairs * (inputs + self.stream)
        return (pairs + has_experts) * inputs


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
    # Extra depths have losses of their own, all of which keep gradients of input and table.
    num_losses = 1 + work.sizes.num_depths
    inputs = work.tokens * work.sizes.dim
    table = rows * work.sizes.dim
    logits = min(work.parallel.loss_chunk, work.tokens) * rows
    # In a dtype smaller than fp32, logits and probabilities exist in both dtypes at once, and so do
    # the gradients of the table.
    casts = itemsize if itemsize < FP32 else 0
    chunk = max((FP32 + casts) * logits, casts * (logits + table))
    # The derivative of a soft cap, and its product with the gradient.
    chunk += (FP32 + itemsize) * logits * (work.sizes.decoder.logit_cap is not None)
    before = itemsize * (num_losses - 1) * (2 * inputs + table)
    kept = num_losses * itemsize * (inputs + table)
    return LossMemory(kept, before + 2 * itemsize * inputs + FP32 * table + chunk)
