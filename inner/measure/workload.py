"""The workload of one inner step: parameters that each rank holds and tokens that it processes. No torch here."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from inner.config import BalanceConfig, ParallelConfig
from inner.flops import layer_costs
from inner.mesh import Degrees
from inner.model.block_params import ROUTER, BlockParam, block_params
from inner.model.sizes import ModelSizes
from inner.model.stage import Stage
from inner.parallel.pipeline.schedule import Action, rank_actions
from inner.parallel.pipeline.stages import plan_stages, ranks_of_stages, stages_at

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

    @property
    def tokens(self) -> int:
        """Number of positions of one micro-batch that a rank holds."""
        return self.micro_batch * -(-self.seq_len // self.degrees.cp)

    @property
    def stream_tokens(self) -> int:
        """Number of positions of the residual stream that a rank holds; fewer under sequence parallelism."""
        tp = self.degrees.tp
        return -(-self.tokens // tp) if self.parallel.splits_stream(tp) else self.tokens

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

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether each micro-batch reduces its gradients, so that they accumulate in shards."""
        return self.parallel.reduces_each_micro_batch(self.degrees.fsdp)

    @cached_property
    def stages(self) -> list[Stage]:
        """All stages, in the order of the model. The last one has the blocks of extra depths, which are
        counted as further layers.
        """
        costs = layer_costs(self.sizes, self.seq_len, self.parallel.recompute)
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
            passes = [(Action("forward", 0, n), Action("backward", 0, n)) for n in range(self.num_micro_batches)]
            return [[action for pair in passes for action in pair]]
        return rank_actions(self.parallel.schedule, self.degrees.pp, len(self.stages), self.num_micro_batches)

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
        """Return the parameters of one layer in groups that FSDP gathers and reduces together, in the
        order in which the backward reduces them. The last group has most of them.
        """
        return self._layer_groups[has_experts]

    @cached_property
    def _layer_groups(self) -> dict[bool, tuple["FsdpParamGroup", ...]]:
        kinds = (False, True) if self.sizes.experts is not None else (False,)
        return {has_experts: self._find_groups(has_experts) for has_experts in kinds}

    def _find_groups(self, has_experts: bool) -> tuple["FsdpParamGroup", ...]:
        params = block_params(self.sizes, has_experts=has_experts)
        if self.compute_itemsize == FP32:
            return (self._group(params),)
        # The dtype of the computation belongs to a group, so a router, which computes in fp32, is a
        # group of its own.
        exact = [param for param in params if param.module == ROUTER]
        others = [param for param in params if param.module != ROUTER]
        routers = (replace(self._group(exact), is_exact=True),) if exact else ()
        return (*routers, self._group(others))

    def _group(self, params: list[BlockParam]) -> "FsdpParamGroup":
        tp = self.degrees.tp
        return FsdpParamGroup(
            tuple(param.rank_shape(self.sizes, tp) for param in params if not param.is_stacked),
            tuple(param.rank_shape(self.sizes, tp) for param in params if param.is_stacked),
        )

    @property
    def table(self) -> "FsdpParamGroup":
        """Parameters of the table of the embedding, or of the head."""
        return FsdpParamGroup(((-(-self.sizes.vocab_size // self.degrees.tp), self.sizes.dim),))

    def embedding(self, stage: Stage) -> "FsdpParamGroup":
        """Return the table of the embedding; empty if the head has the same table."""
        embeds = stage.is_first or (stage.is_last and self.sizes.last_stage_embeds)
        return FsdpParamGroup(self.table.shapes * (embeds and not self.sizes.tie_embeddings))

    def root(self, stage: Stage) -> "FsdpParamGroup":
        """Return the other parameters outside a stage's layers: the last norm and the head, or the
        table of a tied model. The memory of what blocks of extra depths have beside a layer is counted
        here, too.
        """
        ends = self.ends(stage)
        return FsdpParamGroup(ends.shapes + self.joint * (self.sizes.num_depths * stage.is_last))

    def ends(self, stage: Stage) -> "FsdpParamGroup":
        """Return the same without extra depths: what FSDP gathers together."""
        has_table = stage.is_last or (stage.is_first and self.sizes.tie_embeddings)
        return FsdpParamGroup(self.table.shapes * has_table + ((self.sizes.dim, 1),) * stage.is_last)

    @property
    def joint(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the parameters that only blocks of extra depths have, for one of them."""
        params = block_params(self.sizes, has_experts=False, predicts=True)
        return tuple(p.rank_shape(self.sizes, self.degrees.tp) for p in params if p.place == "extra depths")

    @property
    def depth_groups(self) -> tuple["FsdpParamGroup", ...]:
        """The parameters of the block of an extra depth, in the groups that FSDP gathers together."""
        (*others, most) = self.layer_groups(self.sizes.experts is not None)
        return (*others, replace(most, shapes=most.shapes + self.joint))

    def param_groups(self, stage: Stage) -> list["FsdpParamGroup"]:
        """Return all parameters of a stage, in groups that FSDP gathers and reduces together."""
        groups = [self.embedding(stage), self.root(stage)]
        for has_experts, count in self.layer_kinds([stage]):
            groups += self.layer_groups(has_experts) * count
        return groups

    def compute_bytes(self, groups: Iterable["FsdpParamGroup"]) -> int:
        """Return the bytes of whole parameters, or of their gradients, as the computation uses them."""
        return sum(self.itemsize(group) * group.numel for group in groups)

    def itemsize(self, group: "FsdpParamGroup") -> int:
        """Return the bytes per element of a group's parameters when they are gathered."""
        return FP32 if group.is_exact else self.compute_itemsize


@dataclass(frozen=True)
class FsdpParamGroup:
    """Parameters that FSDP gathers and reduces together, as (rows, columns) on the fullest tensor-parallel rank."""

    shapes: tuple[tuple[int, int], ...]
    expert_shapes: tuple[tuple[int, int], ...] = ()
    """The tensors of all experts of a layer, which have a row for each expert."""
    is_exact: bool = False
    """Whether the parameters compute in fp32, whatever the compute dtype."""

    @property
    def all_shapes(self) -> tuple[tuple[int, int], ...]:
        return self.shapes + self.expert_shapes

    @property
    def numel(self) -> int:
        return sum(rows * cols for rows, cols in self.all_shapes)

    def shard_numel(self, num_ranks: int) -> int:
        """Return the number of elements of a rank's shard. Rows are split over the ranks, and the
        last shard is padded.
        """
        return sum(-(-rows // num_ranks) * cols for rows, cols in self.all_shapes)
