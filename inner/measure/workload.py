"""One inner step in figures: who holds which parameters, and how many tokens pass. No torch here."""

from dataclasses import dataclass
from functools import cached_property

from inner.config import ParallelConfig
from inner.mesh import Degrees
from inner.parallel.schedule import Action, actions
from inner.parallel.stages import Stage, plan_stages, ranks_of_stages, stages_at
from inner.presets import ModelSizes


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What an island does in one inner step. Figures are those of coordinate 0 on every axis but pp, the fullest."""

    sizes: ModelSizes
    degrees: Degrees
    parallel: ParallelConfig
    seq_len: int
    micro_batch: int
    num_micro_batches: int
    """Of one rank."""
    compute_itemsize: int
    """Bytes of a number in the compute dtype."""

    @property
    def tokens(self) -> int:
        """Positions that a rank holds of one micro-batch."""
        return self.micro_batch * -(-self.seq_len // self.degrees.cp)

    @property
    def stream_tokens(self) -> int:
        """Of these, positions of the residual stream that a rank holds."""
        tp = self.degrees.tp
        return -(-self.tokens // tp) if self.parallel.splits_stream(tp) else self.tokens

    @property
    def q_numel(self) -> int:
        """Of the queries of a rank's tokens and heads."""
        return self.tokens * -(-self.sizes.num_heads // self.degrees.tp) * self.sizes.head_dim

    @property
    def kv_numel(self) -> int:
        """Of the keys, or the values, that a rank's queries read."""
        return self.tokens * -(-self.sizes.num_kv_heads // self.degrees.tp) * self.sizes.head_dim

    @property
    def frees_after_forward(self) -> bool:
        """ZeRO-3."""
        return self.parallel.frees_after_forward(self.degrees.pp)

    @cached_property
    def stages(self) -> list[Stage]:
        return plan_stages(self.parallel, self.sizes.num_layers, self.degrees.pp)

    @cached_property
    def stage_ranks(self) -> list[int]:
        """The coordinate on pp of each stage."""
        return ranks_of_stages(self.parallel.schedule, len(self.stages), self.degrees.pp)

    @cached_property
    def orders(self) -> list[list[Action]]:
        """What each coordinate on pp does in which order; reading it from some schedules imports torch."""
        if self.degrees.pp == 1:
            passes = [(Action("forward", 0, n), Action("backward", 0, n)) for n in range(self.num_micro_batches)]
            return [[action for pair in passes for action in pair]]
        return actions(self.parallel.schedule, self.degrees.pp, len(self.stages), self.num_micro_batches)

    def stages_at(self, pp_rank: int) -> list[Stage]:
        return stages_at(self.stages, self.stage_ranks, pp_rank)

    @cached_property
    def block(self) -> "Unit":
        return block_unit(self.sizes, self.degrees.tp)

    def root(self, stage: Stage) -> "Unit":
        return root_unit(self.sizes, self.degrees.tp, is_first=stage.is_first, is_last=stage.is_last)


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers and reduces together: (rows, columns) of the fullest tensor-parallel rank."""

    shapes: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        return sum(rows * cols for rows, cols in self.shapes)

    def shard_numel(self, num_ranks: int) -> int:
        """What a rank sends to gather them: rows are cut over the ranks, the last shard padded."""
        return sum(-(-rows // num_ranks) * cols for rows, cols in self.shapes)


def block_unit(sizes: ModelSizes, tp: int) -> Unit:
    """A layer's parameters on one of `tp` ranks."""
    dim, head_dim = sizes.dim, sizes.head_dim
    # Fewer key-value heads than ranks: each rank holds them all.
    kv_heads = sizes.num_kv_heads if sizes.num_kv_heads < tp else -(-sizes.num_kv_heads // tp)
    heads, ffn = -(-sizes.num_heads // tp), -(-sizes.ffn_dim // tp)
    norms = [(dim, 1), (dim, 1)] + ([(head_dim, 1), (head_dim, 1)] if sizes.qk_norm else [])
    attention = [(heads * head_dim, dim), (dim, heads * head_dim)] + 2 * [(kv_heads * head_dim, dim)]
    return Unit(tuple(norms + attention + [(ffn, dim), (ffn, dim), (dim, ffn)]))


def table_unit(sizes: ModelSizes, tp: int) -> Unit:
    """The embedding, or the head, on one of `tp` ranks."""
    return Unit(((-(-sizes.vocab_size // tp), sizes.dim),))


def root_unit(sizes: ModelSizes, tp: int, *, is_first: bool, is_last: bool) -> Unit:
    """What a pipeline stage holds beside its layers: tables and the last norm, on one of `tp` ranks."""
    table = table_unit(sizes, tp).shapes
    num_tables = (is_first or is_last) if sizes.tie_embeddings else is_first + is_last
    return Unit(table * num_tables + (((sizes.dim, 1),) if is_last else ()))
