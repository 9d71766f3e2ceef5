"""Times the attention kernel behind the trainer's call, and the kernels of documents and `cp`.

torch has several kernels behind one call and prefers cuDNN's on Hopper. Packed documents and
context parallelism also need the log-sum-exp of the scores, so they call FlashAttention by name:
inner/model/attention_kernels.py.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from inner.data.micro_batch import Packing, build_packing
from inner.model.attention import causal_attention
from inner.model.attention_kernels import dense_backward, dense_forward
from inner.model.sizes import PRESETS, ModelSizes
from scripts.gpu_report.place import Place, Row, guarded
from scripts.gpu_report.training import TINY, wait_for_device

CALLS = 10
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
DOCUMENTS = 8
"""Number of documents in a sequence that has several."""
TOLERANCE = 0.02
"""Largest difference between the outputs of two kernels, relative to the largest output.

It is more than two roundings of bf16.
"""


def time_attention(place: Place) -> Iterator[Row]:
    shapes = [("150m", 4096, 4), ("1b", 4096, 2), ("8b", 4096, 2), ("8b", 8192, 1)]
    for preset, seq_len, micro_batch in [("tiny", 128, 1)] if place.is_tiny else shapes:
        inputs = draw_inputs(
            place, TINY if place.is_tiny else PRESETS[preset], seq_len, micro_batch
        )
        yield from guarded(
            f"{preset} at {seq_len}", lambda inputs=inputs: time_plain(place, inputs)
        )
        for number in (1, DOCUMENTS):
            row = f"{preset} at {seq_len}, documents: {number}"
            yield from guarded(
                row, lambda inputs=inputs, number=number: time_documents(place, inputs, number)
            )
        yield from guarded(
            f"{preset} at {seq_len}, cp", lambda inputs=inputs: time_context(place, inputs)
        )


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values as the trainer has them, (B, S, H or K, E), and a gradient of the
    output.
    """

    q_BSHE: Tensor
    k_BSKE: Tensor
    v_BSKE: Tensor
    grad_BSHE: Tensor

    @property
    def flops(self) -> float:
        """Operations of causal attention, forward (two products) and backward (five products)."""
        B, S, H, E = self.q_BSHE.shape
        return 3.5 * 2.0 * B * H * S * S * E


def draw_inputs(place: Place, sizes: ModelSizes, seq_len: int, micro_batch: int) -> Inputs:
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads, sizes.num_heads)
    shapes = [(micro_batch, seq_len, num, sizes.head_dim) for num in heads]
    drawn = [torch.randn(shape, device=place.first, dtype=torch.bfloat16) for shape in shapes]
    q, k, v, grad = drawn
    return Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)


def time_plain(place: Place, inputs: Inputs) -> Row:
    """Time the trainer's call, and the same call with each kernel by name."""
    row: Row = {"chosen": find_chosen(inputs), **describe(place, inputs, lambda: run(inputs, None))}
    for name, backend in () if place.is_tiny else KERNELS.items():
        try:
            with sdpa_kernel(backend):
                row[f"{name}_ms"] = 1e3 * call_seconds(place, lambda: run(inputs, None))
        except RuntimeError as error:
            row[name] = str(error)
    return row


def find_chosen(inputs: Inputs) -> str:
    """Return the name of the kernel behind the trainer's call."""
    q, k, v = (
        x.detach().transpose(1, 2).requires_grad_()
        for x in (inputs.q_BSHE, inputs.k_BSKE, inputs.v_BSKE)
    )
    return SDPBackend(torch._fused_sdp_choice(q, k, v, None, 0.0, True, enable_gqa=True)).name


def time_documents(place: Place, inputs: Inputs, number: int) -> Row:
    """Time attention to `number` documents of equal length in each sequence.

    One document has the work of plain attention.
    """
    B, S = inputs.q_BSHE.shape[:2]
    numbers_BS = np.broadcast_to(np.arange(S) * number // S, (B, S))
    packing = build_packing(numbers_BS, np.arange(S), torch.device(place.first))
    row = describe(place, inputs, lambda: run(inputs, packing), share=1 / number)
    if number > 1:
        return row
    worst = difference(
        causal_attention(inputs.q_BSHE, inputs.k_BSKE, inputs.v_BSKE, packing), inputs
    )
    return row | {"worst_difference": worst, "ok": worst <= TOLERANCE}


def run(inputs: Inputs, packing: Packing | None) -> None:
    """Run attention forward and backward."""
    out = causal_attention(inputs.q_BSHE, inputs.k_BSKE, inputs.v_BSKE, packing)
    torch.autograd.grad(out, (inputs.q_BSHE, inputs.k_BSKE, inputs.v_BSKE), inputs.grad_BSHE)


def time_context(place: Place, inputs: Inputs) -> Row:
    """Time the kernels with which a rank of `cp` attends to its own keys, without any exchange."""
    tensors = inputs.q_BSHE, inputs.k_BSKE, inputs.v_BSKE, inputs.grad_BSHE
    q, k, v, grad = (x.detach().transpose(1, 2) for x in tensors)

    def both() -> Tensor:
        output = dense_forward(q, k, v, is_causal=True)
        dense_backward(grad, q, k, v, output, is_causal=True)
        return output.out_BHSE

    worst = difference(both().transpose(1, 2), inputs)
    return describe(place, inputs, both) | {"worst_difference": worst, "ok": worst <= TOLERANCE}


def difference(out_BSHE: Tensor, inputs: Inputs) -> float:
    """Return the largest difference from the trainer's plain call.

    It is relative to the largest output of that call.
    """
    expected = causal_attention(inputs.q_BSHE, inputs.k_BSKE, inputs.v_BSKE).detach().float()
    return float((out_BSHE.detach().float() - expected).abs().max() / expected.abs().max())


def describe(place: Place, inputs: Inputs, work: Callable[[], object], share: float = 1.0) -> Row:
    """Return time and rate of a call that does `share` of the operations."""
    took = call_seconds(place, work)
    return {"ms": 1e3 * took, "TFLOPs_per_s": share * inputs.flops / took / 1e12}


def call_seconds(place: Place, work: Callable[[], object]) -> float:
    """Return the median seconds of a call, after three calls that plan and load what they need."""
    took: list[float] = []
    for _ in range(3 + CALLS):
        wait_for_device(place)
        started = time.perf_counter()
        work()
        wait_for_device(place)
        took.append(time.perf_counter() - started)
    return median(took[3:])
