"""Activations of the two halves of a layer, attention and feed-forward, in bytes per rank. No torch
here.

The figures follow the saved tensors of inner/model: transformer.py, latent_attention.py,
experts.py, router.py and balance.py. A change there needs a change here.
"""

from dataclasses import dataclass

from inner.measure.workload import FP32, Workload
from inner.model.block_params import block_params

INDEX = 8
"""Bytes of the number of an expert, or of a row."""


@dataclass(frozen=True)
class HalfMemory:
    """Bytes of the activations of one half of a layer, for one micro-batch."""

    kept: int
    """What the forward keeps for the backward. For a feed-forward this includes the input of its
    first matrices."""
    products: int
    """Results of matrix products and attention kernels, which selective recomputation keeps."""
    outputs: int
    """Gradients of the outputs of its matrices and of its inner norms, and of its result. A split
    backward holds them between its halves."""
    backward: int
    """Peak of its backward in addition to what the whole layer keeps."""


def norm_bytes(work: Workload, device_type: str, numel: int, rows: int) -> int:
    """Return the bytes of a norm's input and one statistic per row; of LayerNorm two. On a CPU
    RMSNorm keeps both in fp32, and the normed input, too.
    """
    if work.sizes.decoder.has_layer_norm:
        return work.compute_itemsize * numel + 2 * FP32 * rows
    if device_type == "cpu":
        return 2 * FP32 * numel + FP32 * rows
    return work.compute_itemsize * numel + FP32 * rows


def input_bytes(work: Workload) -> int:
    """Return the bytes of the input of a half's first matrices, at all positions. Sequence
    parallelism gathers them.
    """
    return work.compute_itemsize * work.tokens * work.sizes.dim


def attention_memory(work: Workload, device_type: str) -> HalfMemory:
    """Return the memory of a layer's attention."""
    row_sums = FP32 * work.q_numel // work.sizes.head_dim
    num_kernels = (
        min(work.degrees.cp, 3) if work.parallel.context == "all_gather" else work.degrees.cp
    )
    kernels = num_kernels * (work.compute_itemsize * work.q_numel + row_sums)
    # Ulysses keeps the result of attention both before and after the exchange.
    results = 2 if work.degrees.cp > 1 and work.parallel.context == "ulysses" else 1
    # Queries, keys, values and results, and the log-sum-exp of each row.
    kept = work.compute_itemsize * ((1 + results) * work.q_numel + 2 * work.kv_numel) + row_sums
    latent = work.sizes.latent is not None
    kept += _kept_by_latent(work, device_type) if latent else _kept_by_head_norms(work, device_type)
    projected, with_norms = _projected_by_latent(work) if latent else _projected(work)
    inputs = input_bytes(work)
    return HalfMemory(
        kept=kept,
        products=work.compute_itemsize * projected + kernels + inputs,
        outputs=work.compute_itemsize * with_norms + inputs,
        backward=2 * inputs,
    )


def _kept_by_head_norms(work: Workload, device_type: str) -> int:
    """Return what the norms of queries and keys keep."""
    if not work.sizes.qk_norm:
        return 0
    numels = work.q_numel, work.kv_numel
    return sum(
        norm_bytes(work, device_type, numel, numel // work.sizes.head_dim) for numel in numels
    )


def _projected(work: Workload) -> tuple[int, int]:
    """Return the number of elements of queries, keys and values, without and with those of their
    norms.
    """
    projected = work.q_numel + 2 * work.kv_numel
    return projected, projected + (work.q_numel + work.kv_numel if work.sizes.qk_norm else 0)


def _kept_by_latent(work: Workload, device_type: str) -> int:
    """Return what latent attention keeps beside queries, keys, padded values and results: the
    narrow vectors and their norms, and results without the padding.
    """
    latent = work.sizes.latent
    assert latent is not None, "ordinary attention has no narrow vectors"
    itemsize = work.compute_itemsize
    ranks = [latent.kv_rank] if latent.q_rank is None else [latent.q_rank, latent.kv_rank]
    kept = sum(norm_bytes(work, device_type, work.tokens * rank, work.tokens) for rank in ranks)
    kept += itemsize * work.tokens * sum(ranks)
    if device_type != "cpu" or itemsize == FP32:
        # The norm's input is a part of a tensor that also has the shared part of the keys.
        kept += itemsize * work.tokens * latent.rope_dim
    is_padded = latent.value_dim < latent.qk_dim
    return kept + itemsize * work.q_numel // latent.qk_dim * latent.value_dim * is_padded


def _projected_by_latent(work: Workload) -> tuple[int, int]:
    """Return the number of elements of the results of latent attention's matrices but the last,
    without and with those of its norms.
    """
    latent = work.sizes.latent
    assert latent is not None, "ordinary attention has no narrow vectors"
    params = block_params(work.sizes, has_experts=False)
    inputs = [param for param in params if param.module.startswith("attention.") and param.is_input]
    projected = work.tokens * sum(
        param.rank_shape(work.sizes, work.degrees.tp)[0] for param in inputs
    )
    return projected, projected + work.tokens * ((latent.q_rank or 0) + latent.kv_rank)


def feed_forward_memory(work: Workload, has_experts: bool) -> HalfMemory:
    """Return the memory of a layer's feed-forward."""
    if has_experts:
        return _mixture_memory(work)
    inputs = input_bytes(work)
    hidden = work.compute_itemsize * work.tokens * -(-work.sizes.ffn_dim // work.degrees.tp)
    down = work.compute_itemsize * work.sizes.dim * -(-work.sizes.ffn_dim // work.degrees.tp)
    # It keeps four hidden tensors: gate, its SiLU, up, and their product; without a gate up and its
    # GELU.
    is_gated = work.sizes.decoder.gated
    num_products = 2 if is_gated else 1
    return HalfMemory(
        kept=inputs + (4 if is_gated else 2) * hidden,
        products=num_products * hidden + inputs,
        outputs=num_products * hidden + inputs,
        backward=num_products * hidden + inputs + down,
    )


def _mixture_memory(work: Workload) -> HalfMemory:
    """Return the memory of a mixture of experts.

    Every token has a row for each of its experts. A rank has `per_token` rows for each of the
    tokens that it routes. If ranks exchange rows, its experts compute as many, or more if routers
    prefer them.
    """
    experts = work.sizes.experts
    assert experts is not None, "the layer has experts"
    itemsize = work.compute_itemsize
    inputs = input_bytes(work)
    sent = itemsize * work.num_rows * work.sizes.dim
    rows = itemsize * work.num_arriving_rows * work.sizes.dim
    hidden = itemsize * work.num_arriving_rows * experts.dim
    shared = itemsize * work.tokens * -(-experts.shared * experts.dim // work.degrees.tp)
    # The results of a token's experts are weighted and added in fp32.
    results = FP32 * work.num_rows * work.sizes.dim
    logits = FP32 * work.routed_tokens * experts.number
    travels = work.degrees.ep > 1
    kept = (
        _inputs_of_mixture(work) + _kept_by_router(work) + rows + 4 * hidden + results + 4 * shared
    )
    kept += 2 * INDEX * work.num_arriving_rows * travels
    weights = sum(
        param.numel(work.sizes)
        for param in block_params(work.sizes, has_experts=True)
        if param.is_stacked
    )
    # First the gradients of weighted results, and their products with the results, exist in fp32.
    # At the end the gradients of the experts' weights exist, and those of the rows, which are added
    # up in fp32.
    at_start = 2 * results + inputs + 2 * shared
    in_fp32 = results if itemsize < FP32 else 0
    of_weights = itemsize * weights // work.degrees.ep
    at_end = of_weights + rows + max(rows + 2 * hidden, in_fp32) - 4 * hidden - results
    # Rows that return are sorted once more, before the results can be freed.
    between = (2 * rows + inputs) * travels
    return HalfMemory(
        kept=kept,
        products=logits
        + 2 * hidden
        + rows
        + (rows + sent) * travels
        + kept_choices(work)
        + (2 * shared + inputs) * (shared > 0),
        outputs=logits + 2 * hidden + rows + inputs + 2 * shared,
        backward=max(at_start, at_end, between),
    )


def _inputs_of_mixture(work: Workload) -> int:
    """Return the bytes of a layer's input that its router and its shared experts keep.

    The router keeps it in fp32, at the positions that the rank routes. That is the layer's own
    input if that is fp32 and the rank routes all of its positions.
    """
    experts = work.sizes.experts
    assert experts is not None, "the layer has experts"
    routed = FP32 * work.routed_tokens * work.sizes.dim
    is_own = work.compute_itemsize == FP32 and work.degrees.tp == 1
    return routed + input_bytes(work) * (experts.shared > 0 and not is_own)


def kept_choices(work: Workload) -> int:
    """Return the bytes of a router's decision. A repeated forward does not decide anew, so it is
    kept whatever is recomputed.
    """
    experts = work.sizes.experts
    assert experts is not None, "the layer has experts"
    num_rows = work.num_rows
    loads = FP32 * work.micro_batch * experts.number if work.balance.sequence_loss else 0
    return INDEX * num_rows + num_rows * (experts.capacity is not None) + loads


def _kept_by_router(work: Workload) -> int:
    """Return the bytes of scores, of the chosen experts, of the order of the rows, and of
    weights.
    """
    experts = work.sizes.experts
    assert experts is not None, "the layer has experts"
    num_rows = work.num_rows
    tokens = work.routed_tokens
    scores = FP32 * tokens * experts.number
    kept = scores + kept_choices(work) + 2 * INDEX * num_rows + FP32 * num_rows
    if experts.renormalise:
        kept += FP32 * (num_rows + tokens)
    if work.balance.sequence_loss:
        kept += FP32 * tokens
    if work.balance.router_z_loss:
        kept += scores + FP32 * tokens
    return kept
