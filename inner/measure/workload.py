"""The workload of one inner step: parameters that each rank holds and tokens that it processes. No
torch here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from inner.config import BalanceConfig, ExpertsConfig, ParallelConfig
from inner.flops import layer_costs
from inner.mesh import Degrees
from inner.model.block_params import ROUTER, BlockParam, block_params
from inner.model.sizes import ModelSizes
from inner.model.stage import Stage
from inner.parallel.pipeline.schedule import Action, rank_actions
from inner.parallel.pipeline.stages import plan_stages, ranks_of_stages, stages_at
from inner.parallel.weights.zero_stage import (
    cut_buckets,
    has_sparse_experts,
    has_whole_weights,
    uses_fsdp,
)

FP32 = 4
MANAGED_STAGES = 3
"""Number of stages whose weights torch keeps in schedules with several stages per rank. They are
the next ones to compute."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """An island's inner step. On every axis except pp, figures are for coordinate 0, which has the
    largest share.
    """

    sizes: ModelSizes
    degrees: Degrees
    parallel: ParallelConfig
    seq_len: int
    micro_batch: int
    num_micro_batches: int
    """Number of micro-batches of one rank."""
    compute_itemsize: int
    """Bytes per element in the compute dtype."""
    deals_matrices: bool = False
    """Whether the optimizer distributes whole matrices of the layers over the ranks, as Muon
    does."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """Losses of the routers, which keep and send values of their own."""
    longest_seq_len: int | None = None
    """Length of the longest sequences of the run, by which layers are dealt to pipeline stages.
    None: `seq_len`."""
    all_rows_arrive: bool = False
    """Whether the routers of all ranks of ep send all their tokens to this rank's experts.
    Otherwise each expert gets equally many.
    """

    @property
    def tokens(self) -> int:
        """Number of positions of one micro-batch that a rank holds."""
        return self.micro_batch * -(-self.seq_len // self.degrees.cp)

    @property
    def stream_tokens(self) -> int:
        """Number of positions of the residual stream that a rank holds; fewer under sequence
        parallelism.
        """
        tp = self.degrees.tp
        return -(-self.tokens // tp) if self.parallel.splits_stream(tp) else self.tokens

    @property
    def routed_tokens(self) -> int:
        """Number of positions of one micro-batch that a rank routes to experts. Ranks of tp divide
        the positions of a rank among them.
        """
        return -(-self.tokens // self.degrees.tp)

    @property
    def num_rows(self) -> int:
        """Number of rows that a rank sends to experts in a layer: one per token and chosen
        expert.
        """
        return self.routed_tokens * self._experts.per_token

    @property
    def num_arriving_rows(self) -> int:
        """Number of rows that a rank's experts compute in a layer."""
        if not self.all_rows_arrive or self.degrees.ep == 1:
            return self.num_rows
        # The chosen experts of a token differ, so they are on one rank only as far as it has
        # experts.
        return (
            self.degrees.ep
            * self.routed_tokens
            * min(self._experts.per_token, self.num_held_experts)
        )

    @property
    def num_held_experts(self) -> int:
        """Number of a layer's experts that a rank of ep computes."""
        return self._experts.number // self.degrees.ep

    @property
    def cuts_rows_of_experts(self) -> bool:
        """Whether edp shards the rows of each expert, because it has more ranks than experts."""
        return self.has_sparse_mesh and self.degrees.edp > self.num_held_experts

    @property
    def _experts(self) -> ExpertsConfig:
        assert self.sizes.experts is not None, "the model has experts"
        return self.sizes.experts

    @property
    def has_sparse_mesh(self) -> bool:
        """Whether the model has experts, and they are spread in another way than other weights."""
        return has_sparse_experts(self.degrees, self.sizes)

    def num_matrix_pairs(self, has_experts: bool) -> int:
        """Return the number of a layer's pairs of matrices that tensor parallelism divides: those
        of attention, and of a feed-forward or the shared experts.
        """
        return 2 if not has_experts or self._experts.shared else 1

    @property
    def q_numel(self) -> int:
        """Number of elements of the queries, for a rank's tokens and heads."""
        return self.tokens * -(-self.sizes.num_heads // self.degrees.tp) * self.sizes.head_dim

    @property
    def kv_numel(self) -> int:
        """Number of elements of the keys, or of the values, for a rank's tokens and heads."""
        return self.tokens * -(-self.sizes.num_kv_heads // self.degrees.tp) * self.sizes.head_dim

    @property
    def frees_after_forward(self) -> bool:
        """Whether blocks free their weights after the forward (ZeRO-3)."""
        return self.parallel.frees_after_forward(self.degrees.pp)

    @cached_property
    def has_whole_weights(self) -> bool:
        """Whether several ranks compute with the same weights, and each holds them whole
        (ZeRO-0).
        """
        return has_whole_weights(self.parallel, self.degrees, self.sizes)

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP gathers the weights, or the experts alone, and reduces their gradients."""
        return uses_fsdp(self.parallel, self.degrees, self.sizes)

    @property
    def num_shards(self) -> int:
        """Number of ranks over which each weight is sharded."""
        return 1 if self.has_whole_weights else self.degrees.fsdp

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether each micro-batch reduces its gradients, so that they accumulate in shards."""
        return self.parallel.reduces_each_micro_batch(self.num_shards)

    @cached_property
    def stages(self) -> list[Stage]:
        """All stages, in the order of the model. The last one has the blocks of extra depths, which
        are counted as further layers.
        """
        longest = self.longest_seq_len or self.seq_len
        costs = layer_costs(self.sizes, longest, self.parallel.recompute)
        (*others, last) = plan_stages(self.parallel, costs, self.degrees.pp)
        return [*others, replace(last, layers=range(last.layers.start, self.sizes.all_layers.stop))]

    @cached_property
    def stage_ranks(self) -> list[int]:
        """The coordinate on pp of each stage."""
        return ranks_of_stages(self.parallel.schedule, len(self.stages), self.degrees.pp)

    @cached_property
    def orders(self) -> list[list[Action]]:
        """Actions of each coordinate on pp, in order. Some schedules import torch to find them."""
        if self.degrees.pp == 1:
            passes = [
                (Action("forward", 0, n), Action("backward", 0, n))
                for n in range(self.num_micro_batches)
            ]
            return [[action for pair in passes for action in pair]]
        return rank_actions(
            self.parallel.schedule, self.degrees.pp, len(self.stages), self.num_micro_batches
        )

    def stages_at(self, pp_rank: int) -> list[Stage]:
        return stages_at(self.stages, self.stage_ranks, pp_rank)

    def layer_kinds(self, stages: list[Stage]) -> list[tuple[bool, int]]:
        """Return how many layers of some stages are dense, and how many have experts, as
        (has_experts, count). A kind that does not occur is left out.
        """
        counts = {False: 0, True: 0}
        for stage in stages:
            for has_experts, count in self.sizes.layer_kinds(stage.layers):
                counts[has_experts] += count
        return [(has_experts, count) for has_experts, count in counts.items() if count]

    def layer_groups(self, has_experts: bool) -> tuple["FsdpParamGroup", ...]:
        """Return the parameters of one layer in groups that FSDP gathers and reduces together, in
        the order in which the backward reduces them. The last group has most of them.
        """
        return self._layer_groups[has_experts]

    @cached_property
    def _layer_groups(self) -> dict[bool, tuple["FsdpParamGroup", ...]]:
        kinds = (False, True) if self.sizes.experts is not None else (False,)
        return {has_experts: self._find_groups(has_experts) for has_experts in kinds}

    def _find_groups(self, has_experts: bool) -> tuple["FsdpParamGroup", ...]:
        params = block_params(self.sizes, has_experts=has_experts)
        # The dtype of the computation belongs to a group, so a router, which computes in fp32, is a
        # group of its own in other dtypes; and so are experts on a mesh of their own.
        exact = [
            param for param in params if param.module == ROUTER and self.compute_itemsize != FP32
        ]
        spread = [param for param in params if param.is_stacked and self.has_sparse_mesh]
        others = [param for param in params if param not in exact and param not in spread]
        routers = [replace(self._group(exact), is_exact=True)] if exact else []
        experts = [self._sparse_group(spread)] if spread else []
        return (*experts, *routers, self._group(others))

    def _group(self, params: list[BlockParam]) -> "FsdpParamGroup":
        tp = self.degrees.tp
        return FsdpParamGroup(
            tuple(param.rank_shape(self.sizes, tp) for param in params if not param.is_stacked),
            tuple(param.rank_shape(self.sizes, tp) for param in params if param.is_stacked),
            num_shards=self.num_shards,
        )

    def _sparse_group(self, params: list[BlockParam]) -> "FsdpParamGroup":
        """Return the experts of a rank of ep. edp shards experts, or the rows of each if there are
        more ranks than experts.
        """
        held = self.num_held_experts
        shapes = [param.shape(self.sizes) for param in params]
        cuts_rows = self.cuts_rows_of_experts
        seen = [(rows, held * cols) if cuts_rows else (held, rows * cols) for rows, cols in shapes]
        return FsdpParamGroup((), tuple(seen), num_shards=self.degrees.edp, is_sparse=True)

    @property
    def table(self) -> "FsdpParamGroup":
        """Parameters of the table of the embedding, or of the head."""
        rows = -(-self.sizes.vocab_size // self.degrees.tp)
        return FsdpParamGroup(((rows, self.sizes.dim),), num_shards=self.num_shards)

    def embedding(self, stage: Stage) -> "FsdpParamGroup":
        """Return the table of the embedding; empty if the head has the same table."""
        embeds = stage.is_first or (stage.is_last and self.sizes.last_stage_embeds)
        shapes = self.table.shapes * embeds + self.learned_positions(stage)
        return replace(self.table, shapes=() if self.sizes.tie_embeddings else shapes)

    def learned_positions(self, stage: Stage) -> tuple[tuple[int, int], ...]:
        """Return the shape of the learned positions, if the stage has any."""
        learned = self.sizes.decoder.max_positions
        return () if learned is None or not stage.is_first else ((learned, self.sizes.dim),)

    @property
    def last_norm(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the parameters of the last norm."""
        return ((self.sizes.dim, 1),) * (2 if self.sizes.decoder.has_norm_bias else 1)

    def root(self, stage: Stage) -> "FsdpParamGroup":
        """Return the other parameters outside a stage's layers: the last norm and the head, or the
        table of a tied model. The memory of what blocks of extra depths have beside a layer is
        counted here, too.
        """
        ends = self.ends(stage)
        return replace(
            ends, shapes=ends.shapes + self.joint * (self.sizes.num_depths * stage.is_last)
        )

    def ends(self, stage: Stage) -> "FsdpParamGroup":
        """Return the same without extra depths: what FSDP gathers together."""
        has_table = stage.is_last or (stage.is_first and self.sizes.tie_embeddings)
        learned = self.learned_positions(stage) if self.sizes.tie_embeddings else ()
        return replace(
            self.table,
            shapes=self.table.shapes * has_table + learned + self.last_norm * stage.is_last,
        )

    def _groups_of(self, layer: int) -> tuple["FsdpParamGroup", ...]:
        """Return the parameters of a layer, or of the block of an extra depth."""
        is_depth = layer >= self.sizes.num_layers
        return self.depth_groups if is_depth else self.layer_groups(self.sizes.has_experts(layer))

    @property
    def joint(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the parameters that only blocks of extra depths have, for one of them."""
        params = block_params(self.sizes, has_experts=False, predicts=True)
        return tuple(
            p.rank_shape(self.sizes, self.degrees.tp) for p in params if p.place == "extra depths"
        )

    @property
    def depth_groups(self) -> tuple["FsdpParamGroup", ...]:
        """The parameters of the block of an extra depth, in the groups that FSDP gathers
        together.
        """
        (*others, most) = self.layer_groups(self.sizes.experts is not None)
        return (*others, replace(most, shapes=most.shapes + self.joint))

    def param_groups(self, stage: Stage) -> list["FsdpParamGroup"]:
        """Return all parameters of a stage, in groups that FSDP gathers and reduces together."""
        groups = [self.embedding(stage), self.root(stage)]
        for has_experts, count in self.layer_kinds([stage]):
            groups += self.layer_groups(has_experts) * count
        return groups

    def gradient_buckets(self, stage: Stage) -> list[int]:
        """Return the bytes of the buckets in which replicas with whole weights sum a stage's
        gradients, in the order in which they are sent.
        """
        table = FP32 * self.table.numel
        norm = FP32 * self.sizes.dim * len(self.last_norm)
        has_own_head = stage.is_last and not self.sizes.tie_embeddings
        has_embedding = stage.is_first or (stage.is_last and self.sizes.last_stage_embeds)
        layers = [
            FP32 * sum(group.numel for group in self._groups_of(layer))
            for layer in reversed(stage.layers)
        ]
        learned = FP32 * sum(rows * cols for rows, cols in self.learned_positions(stage))
        groups = [
            norm * stage.is_last + table * has_own_head,
            *layers,
            table * has_embedding + learned,
        ]
        sizes = [size for size in groups if size]
        return [sum(sizes[index] for index in bucket) for bucket in cut_buckets(sizes)]

    def compute_bytes(self, groups: Iterable["FsdpParamGroup"]) -> int:
        """Return the bytes of whole parameters, or of their gradients, as the computation uses
        them.
        """
        return sum(self.itemsize(group) * group.numel for group in groups)

    def itemsize(self, group: "FsdpParamGroup") -> int:
        """Return the bytes per element of a group's parameters when they are gathered."""
        return FP32 if group.is_exact else self.compute_itemsize


@dataclass(frozen=True)
class FsdpParamGroup:
    """Parameters that FSDP gathers and reduces together, as (rows, columns) on the fullest
    tensor-parallel rank.
    """

    shapes: tuple[tuple[int, int], ...]
    expert_shapes: tuple[tuple[int, int], ...] = ()
    """The tensors of all experts of a layer, which have a row for each expert, or for each row of
    all experts.
    """
    num_shards: int = 1
    """Number of ranks over which they are sharded."""
    is_exact: bool = False
    """Whether the parameters compute in fp32, whatever the compute dtype."""
    is_sparse: bool = False
    """Whether they are experts on a mesh of their own, of edp and ep."""

    @property
    def axis(self) -> str:
        """The axis of the ranks over which they are sharded."""
        return "edp" if self.is_sparse else "fsdp"

    @property
    def all_shapes(self) -> tuple[tuple[int, int], ...]:
        return self.shapes + self.expert_shapes

    @property
    def numel(self) -> int:
        return sum(rows * cols for rows, cols in self.all_shapes)

    @property
    def shard_numel(self) -> int:
        """Number of elements of a rank's shard. Rows are split over the ranks, and the last shard
        is padded.
        """
        return sum(-(-rows // self.num_shards) * cols for rows, cols in self.all_shapes)
