"""Which ZeRO stage a layout has, and how gradients are put into buckets if weights are whole. No
torch here.
"""

from collections.abc import Iterator, Sequence
from math import prod

from inner.config import ParallelConfig
from inner.mesh import Degrees
from inner.model.block_params import block_params
from inner.model.sizes import ModelSizes, OwnModel

MOST_WHOLE = 500_000_000
"""Number of parameters up to which the ranks of cp hold whole weights unless the config says
otherwise. Weights, gradients and AdamW's states of as many take 8 GB."""
BUCKET_BYTES = 25_000_000
"""A bucket of gradients is full when it has this size. Small buckets cost a call each; large ones
overlap less of the backward."""


def has_whole_weights(
    parallel: ParallelConfig, degrees: Degrees, model: ModelSizes | OwnModel
) -> bool:
    """Return whether several ranks compute with the same weights, and each of them holds these
    weights whole (ZeRO-0).

    If the config does not say it, they do where nothing is gained by shards (replicas alone), and
    on ranks of cp if the model is small. Experts that are spread in another way than other weights
    are always sharded.
    """
    if degrees.num_copies == 1 or degrees.dp_shard > 1 or has_sparse_experts(degrees, model):
        return False
    if parallel.zero is not None:
        return parallel.zero == 0
    return degrees.cp == 1 or _num_params(model) // (degrees.pp * degrees.tp) <= MOST_WHOLE


def uses_fsdp(parallel: ParallelConfig, degrees: Degrees, model: ModelSizes | OwnModel) -> bool:
    """Return whether several ranks compute with the same weights, or with the same experts, and
    FSDP gathers them.
    """
    if has_whole_weights(parallel, degrees, model):
        return False
    has_expert_copies = (
        has_sparse_experts(degrees, model) and degrees.dp_replicate * degrees.edp > 1
    )
    return degrees.num_copies > 1 or has_expert_copies


def has_sparse_experts(degrees: Degrees, model: ModelSizes | OwnModel) -> bool:
    """Return whether the model has experts, and they are spread over the ranks in another way than
    other weights.
    """
    return isinstance(model, ModelSizes) and model.experts is not None and degrees.has_sparse_mesh


def cut_buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of the groups of gradients in each bucket, in order.

    `sizes`: bytes of the groups, in the order in which the backward computes them. A bucket ends
    with the group that makes it full.
    """
    bucket: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        bucket.append(index)
        held += size
        if held >= BUCKET_BYTES:
            yield bucket
            bucket = []
            held = 0
    if bucket:
        yield bucket


def _num_params(model: ModelSizes | OwnModel) -> int:
    assert isinstance(model, ModelSizes), "an own model is not spread over cp"
    layers = (
        param.numel(model)
        for layer in range(model.num_layers)
        for param in block_params(model, has_experts=model.has_experts(layer))
    )
    return sum(map(prod, model.outside_params.values())) + sum(layers)
