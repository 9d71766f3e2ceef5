"""Config of an island's mesh, and of how each axis of the mesh is used."""

from typing import Literal

from pydantic import Field, model_validator

from inner.config.section import Section


class MeshConfig(Section):
    """Degrees of the island's mesh. The product of all but ep is the number of ranks; dp_shard -1
    takes all ranks that the others leave.
    """

    pp: int = Field(default=1, ge=1)
    """Number of pipeline ranks, each of which holds some of the layers."""
    dp_replicate: int = Field(default=1, ge=1)
    """Number of replicas of the weights, each of which trains on its share of a step's
    sequences."""
    dp_shard: int = Field(default=-1, ge=-1)
    """Number of ranks over which FSDP shards weights, gradients and optimizer state. They also
    share a step's sequences. -1: all ranks that the other degrees leave."""
    cp: int = Field(default=1, ge=1)
    """Number of ranks that share the positions of a sequence (context parallelism)."""
    tp: int = Field(default=1, ge=1)
    """Number of ranks that share the heads and the feed-forward of a layer (tensor parallelism)."""

    ep: int = Field(default=1, ge=1)
    """Number of ranks among which the experts of a layer are divided (expert parallelism). These
    ranks are taken from dp_shard x cp x tp, so ep adds no ranks. It is 1 or a multiple of tp, and
    must divide model.experts.number."""

    @model_validator(mode="after")
    def _shard_is_a_degree(self) -> "MeshConfig":
        if self.dp_shard == 0:
            raise ValueError("dp_shard must be a positive degree or -1 (all remaining ranks)")
        return self


Schedule = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "breadth_first",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
]
ContextMethod = Literal["ring", "all_gather", "ulysses"]
Recompute = Literal["none", "attention", "selective", "full"]
Accumulate = Literal["sharded", "whole"]


class ParallelConfig(Section):
    """How an island uses the axes of its mesh. These settings change the results only by
    rounding.
    """

    zero: Literal[0, 1, 2, 3] | None = None
    """ZeRO stage. 0: each rank holds its weights whole, and gradients are summed once per step,
    while the backward runs; dp_shard must be 1. 1: FSDP shards master weights and optimizer states
    over dp_shard and cp, and each rank gathers all weights once per step and reduces whole
    gradients once per step, so `accumulate` has no effect. 2 and 3: FSDP shards the weights over
    dp_shard and cp; 3 frees a block's gathered weights after its forward, 2 keeps them. null: 0 if
    dp_shard is 1 and either cp is 1 or a rank's share of the model has at most 500M parameters;
    otherwise 2 with a pipeline and 3 without. Experts under ep or tp need 2 or 3.
    """
    accumulate: Accumulate = "sharded"
    """How gradients of several micro-batches are accumulated. `sharded`: each micro-batch reduces
    its gradients over the shards. `whole`: every rank keeps whole gradients until the last
    micro-batch, which sends less and needs 4 bytes per parameter."""
    sequence_parallel: bool | Literal["auto"] = "auto"
    """With tensor parallelism: whether to also split the norms and the residual stream along the
    sequence. auto: not on a CPU without a pipeline, where one all-reduce over gloo is faster than a
    gather and a scatter; otherwise yes."""
    loss_chunk: int = Field(default=4096, ge=1)
    """Number of tokens whose logits are in memory at the same time."""
    schedule: Schedule = "1f1b"
    """Order in which the pipeline processes micro-batches, if pp is above 1."""
    stages_per_rank: int | None = Field(default=None, ge=1)
    """Number of (virtual) pipeline stages per rank. null: 1 for gpipe and 1f1b, otherwise 2."""
    layers_per_stage: tuple[int, ...] | None = None
    """Number of layers of each stage, first to last. null: chosen so that the largest number of
    FLOPs of a stage, with the head, is as small as possible."""
    context: ContextMethod = "ring"
    """How attention reads the positions of other ranks if cp is above 1."""
    recompute: Recompute = "none"
    """Which activations a block's backward recomputes instead of keeping them from the forward."""
    compile: bool | Literal["auto"] = "auto"
    """Whether each block is compiled with torch.compile. auto: on CUDA with triton, if the layout
    allows it and cp is 1."""

    def frees_after_forward(self, pp: int) -> bool:
        """Return whether blocks free their gathered weights after the forward. A pipeline would
        gather them per micro-batch.
        """
        return self.zero == 3 or (self.zero is None and pp == 1)

    def reduces_each_micro_batch(self, num_shards: int) -> bool:
        """Return whether each micro-batch reduces its gradients over the shards. With one shard
        there is nothing to reduce.
        """
        return self.accumulate == "sharded" and self.zero != 1 and num_shards > 1

    @property
    def keeps_weights(self) -> bool:
        """Whether gathered weights are kept from the first micro-batch of a step to the last."""
        return self.zero == 1

    def on_device(self, device_type: str, pp: int) -> "ParallelConfig":
        """Return the config with `sequence_parallel` decided for a type of device."""
        if self.sequence_parallel != "auto":
            return self
        # A pipeline would send the whole stream once for each rank of tp.
        return self.model_copy(update={"sequence_parallel": device_type != "cpu" or pp > 1})

    def splits_stream(self, tp: int) -> bool:
        """Return whether each tp rank holds only its share of the positions of the residual
        stream. An undecided `auto` counts as yes.
        """
        return tp > 1 and bool(self.sequence_parallel)


class ProfileConfig(Section):
    """The inner steps that every rank profiles."""

    steps: tuple[int, int] | None = None
    """First and last step, counted from 1. null: no profile."""
    memory: bool = False
    """Whether to also record memory allocations by operation and time."""

    @model_validator(mode="after")
    def _steps_are_a_range(self) -> "ProfileConfig":
        if self.steps is not None and not 1 <= self.steps[0] <= self.steps[1]:
            raise ValueError(
                f"steps {list(self.steps)} must be [first, last] with 1 <= first <= last"
            )
        return self
