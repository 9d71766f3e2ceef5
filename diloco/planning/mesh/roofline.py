"""The roofline of an inner step on a GPU: the shortest possible time of each kind of work, for
`diloco mesh --gpu`.

The roofline (Williams et al., 2009) bounds the speed of each kind of work. A kind of work takes at
least its operations divided by the GPU's rate of operations, and at least its bytes divided by the
rate of the GPU's memory. The larger time is its bound. Only bytes that must be moved are counted:
inputs are read and results are written, but values that stay within a kernel do not count. This
module does not import torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rich.table import Table

from diloco.formatting import human_bytes
from diloco.planning.mesh.gpus import Gpu
from diloco.planning.mesh.traffic import plain_table
from inner.flops import flops_per_token
from inner.measure.memory import optimizer_bytes
from inner.measure.workload import FP32, Workload
from inner.model.block_params import ROUTER, block_params
from inner.optim.state_bytes import StateBytes

PRODUCTS = 3
"""Matrix products of a matrix in a step: the forward, the gradient of its input, that of its
weights.
"""


@dataclass(frozen=True)
class StepWork:
    """One kind of work of a mean rank in a step."""

    name: str
    flops: float
    num_bytes: float

    def seconds(self, gpu: Gpu) -> float:
        """Seconds that it takes at least."""
        return max(self.flops / gpu.flops, self.num_bytes / gpu.memory_rate)

    def bound(self, gpu: Gpu) -> str:
        """What bounds it: computing or memory."""
        return (
            "computing" if self.flops / gpu.flops >= self.num_bytes / gpu.memory_rate else "memory"
        )


def step_work(work: Workload, optimizer: StateBytes) -> list[StepWork]:
    """The kinds of work of an inner step, of the mean over the ranks of pp."""
    micro_batches = work.num_micro_batches
    layers = work.sizes.num_layers / work.degrees.pp * micro_batches
    heads = micro_batches / work.degrees.pp
    kinds = [
        StepWork(
            "products of layers",
            layers * _of_mean(work, _block_flops),
            layers * _of_mean(work, _block_bytes),
        ),
        StepWork("attention", layers * _attention_flops(work), layers * _attention_bytes(work)),
        StepWork("norms, SwiGLU, sums", 0.0, layers * _of_mean(work, _elementwise_bytes)),
        StepWork("head and loss", heads * _head_flops(work), heads * _head_bytes(work)),
        StepWork("optimizer", 0.0, _optimizer_bytes(work, optimizer)),
    ]
    again = _again_flops(work)
    if again:
        kinds.insert(3, StepWork("computed again", layers * again, 0.0))
    return kinds


def model_flops(work: Workload) -> float:
    """Operations of a step that MFU counts, of a mean rank: attention as if each position saw
    all.
    """
    per_token = flops_per_token(work.sizes, work.seq_len).total
    tokens = work.micro_batch * work.seq_len * work.num_micro_batches
    return per_token * tokens / (work.degrees.cp * work.degrees.tp * work.degrees.pp)


def roofline_mfu(work: Workload, optimizer: StateBytes, gpu: Gpu) -> float:
    """The MFU of a step that takes exactly as long as its kinds of work do at best, one after the
    other.
    """
    seconds = sum(kind.seconds(gpu) for kind in step_work(work, optimizer))
    return model_flops(work) / (seconds * gpu.flops)


def roofline_table(work: Workload, optimizer: StateBytes, gpu: Gpu) -> Table:
    """Each kind of work with its operations, its bytes, and the seconds that it takes at best."""
    table = plain_table(("work", "bound by"), ("TFLOP", "bytes", "FLOP/byte", "seconds", "share"))
    kinds = step_work(work, optimizer)
    total = sum(kind.seconds(gpu) for kind in kinds)
    for kind in kinds:
        intensity = f"{kind.flops / kind.num_bytes:.0f}" if kind.num_bytes and kind.flops else ""
        flops = f"{kind.flops / 1e12:.3g}" if kind.flops else ""
        num_bytes = human_bytes(kind.num_bytes) if kind.num_bytes else ""
        seconds = kind.seconds(gpu)
        cells = (flops, num_bytes, intensity, f"{seconds:.3g}", f"{seconds / total:.1%}")
        table.add_row(kind.name, kind.bound(gpu), *cells)
    ridge = f"{gpu.flops / gpu.memory_rate:.0f}"
    table.add_row("at full rates", "", "", "", ridge, f"{total:.3g}", "")
    return table


def _of_mean(work: Workload, figure: Callable[[Workload, bool], float]) -> float:
    """Return the mean of a figure over dense layers and layers with experts."""
    layers = work.sizes.layer_kinds(range(work.sizes.num_layers))
    return (
        sum(count * figure(work, has_experts) for has_experts, count in layers)
        / work.sizes.num_layers
    )


def _matrices(work: Workload, has_experts: bool) -> list[tuple[int, int, int, int]]:
    """Return the matrices of a layer on a rank: number of rows that each multiplies, rows, columns,
    and number of such matrices. With experts, every row is multiplied by one of several matrices.
    """
    tp = work.degrees.tp
    found = []
    for param in block_params(work.sizes, has_experts=has_experts):
        if param.is_stacked and work.sizes.experts is not None:
            rows, columns = param.shape(work.sizes)
            found.append((work.num_rows, rows, columns, work.num_held_experts))
        elif param.is_matrix:
            # Ranks of tp divide the positions that a router sees.
            num_rows = work.routed_tokens if param.module == ROUTER else work.tokens
            found.append((num_rows, *param.rank_shape(work.sizes, tp), 1))
    return found


def _block_flops(work: Workload, has_experts: bool) -> float:
    matrices = _matrices(work, has_experts)
    return (
        2.0 * PRODUCTS * sum(num_rows * rows * columns for num_rows, rows, columns, _ in matrices)
    )


def _block_bytes(work: Workload, has_experts: bool) -> float:
    """Each product reads two of input, result and weights, and writes the third. The weights of all
    experts are read, because with many tokens each expert is chosen.
    """
    numel = sum(
        num_rows * (rows + columns) + count * rows * columns
        for num_rows, rows, columns, count in _matrices(work, has_experts)
    )
    return float(PRODUCTS * work.compute_itemsize * numel)


def _attention_flops(work: Workload) -> float:
    """The causal half of the scores and values, and of the scores that the backward's kernel
    computes again.
    """
    flops = flops_per_token(work.sizes, work.seq_len)
    whole = (flops.attention + flops.recomputed + flops.padding) / work.sizes.num_layers
    return 0.5 * whole * work.tokens / work.degrees.tp


def _attention_bytes(work: Workload) -> float:
    """Forward: queries, keys and values are read, the result is written. Backward: these and a
    gradient for each.
    """
    forward = 2 * work.q_numel + 2 * work.kv_numel
    backward = 4 * work.q_numel + 4 * work.kv_numel
    return float(work.compute_itemsize * (forward + backward))


def _elementwise_bytes(work: Workload, has_experts: bool) -> float:
    """Of a layer: its norms, each with the sum before it, RoPE, and SwiGLU, each as one kernel that
    runs once. With experts also the copies of a token's row for each of its experts, and the sum of
    their results.
    """
    stream = work.stream_tokens * work.sizes.dim
    # A norm reads stream and branch and writes the sum and its norm; backward it reads three and
    # writes one.
    norms = work.sizes.decoder.num_norms * (4 + 4) * stream
    # The forward reads the gate and up tensors and writes their product. The backward reads three
    # tensors of this size and writes two.
    # Without a gate there is one tensor less to read, and one less to write backward.
    per_hidden = 3 + 5 if work.sizes.decoder.gated else 2 + 3
    swiglu = per_hidden * _hidden_numel(work, has_experts)
    rope = (2 + 2) * (work.q_numel + work.kv_numel)
    return float(work.compute_itemsize * (norms + swiglu + rope + _moved_numel(work, has_experts)))


def _hidden_numel(work: Workload, has_experts: bool) -> int:
    """Number of elements of one hidden tensor of a layer's feed-forwards."""
    experts = work.sizes.experts
    if has_experts and experts is not None:
        shared = -(-experts.shared * experts.dim // work.degrees.tp)
        return work.num_rows * experts.dim + work.tokens * shared
    return work.tokens * -(-work.sizes.ffn_dim // work.degrees.tp)


def _moved_numel(work: Workload, has_experts: bool) -> int:
    """Number of elements that are read or written where a token's row goes to its experts, and
    their results come back.

    The forward reads a token's row and writes its copies, reads the results and writes their sum.
    The backward reads a gradient, and the results for the gradients of the weights, and writes a
    gradient for each result; then it reads the gradients of the copies and writes their sum.
    """
    experts = work.sizes.experts
    if not has_experts or experts is None:
        return 0
    of_tokens = work.routed_tokens * work.sizes.dim
    return (2 + 2) * of_tokens + (2 + 3) * of_tokens * experts.per_token


def _again_flops(work: Workload) -> float:
    """Operations of a layer that `recompute` adds to those of the attention kernel, the causal half
    of scores.
    """
    recompute = work.parallel.recompute
    plain = flops_per_token(work.sizes, work.seq_len)
    flops = flops_per_token(work.sizes, work.seq_len, recompute)
    again = (flops.recomputed - plain.recomputed) / work.sizes.num_layers
    if recompute in ("attention", "full"):
        again -= plain.attention / work.sizes.num_layers / PRODUCTS / 2
    return again * work.tokens / work.degrees.tp


def _head_flops(work: Workload) -> float:
    return 2.0 * PRODUCTS * work.tokens * work.table.numel


def _head_bytes(work: Workload) -> float:
    """The products, and between them logits that are read once and replaced by their gradient."""
    rows = -(-work.sizes.vocab_size // work.degrees.tp)
    products = PRODUCTS * (work.tokens * (rows + work.sizes.dim) + work.table.numel)
    return float(work.compute_itemsize * (products + 2 * work.tokens * rows))


def _optimizer_bytes(work: Workload, optimizer: StateBytes) -> float:
    """Master weights and states are read and written, the gradient is read, for each parameter of
    the shard.

    Products of Muon's own are not counted.
    """
    stages = [stage for rank in range(work.degrees.pp) for stage in work.stages_at(rank)]
    groups = [group for stage in stages for group in work.param_groups(stage)]
    numel = sum(group.shard_numel for group in groups)
    states = optimizer_bytes(work, stages, optimizer)
    return (3 * FP32 * numel + 2 * states) / work.degrees.pp
