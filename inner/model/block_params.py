"""The parameters of a decoder block: their shapes, and how tensor parallelism cuts each of them. No
torch here.

Other facts about a model's parameters follow from this list: their number and specs, a rank's
share, FLOPs, placements, and their names in Hugging Face's files. To add a parameter for a family
of models, add a line here and a module with the same name in transformer.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

from inner.model.sizes import ModelSizes

Cut = Literal["heads", "kv_heads", "hidden", "columns of heads", "columns of hidden", "stream", "each head"]
"""What the ranks of tp divide among them: rows or columns of a matrix, by heads or by hidden units.

    stream       nothing: the parameter acts on positions of the residual stream, which sequence parallelism divides
    each head    nothing: the parameter acts on each head, and the heads are divided
"""
Size = Callable[[ModelSizes], int]


@dataclass(frozen=True)
class BlockParam:
    """One parameter that a block may have."""

    name: str
    """The name after `layers.<number>.`"""
    sizes_of: tuple[Size, ...]
    """Its number of rows, and for a matrix its number of columns."""
    cut: Cut
    huggingface: str
    """The name after `model.layers.<number>.` in Hugging Face's files."""
    exists: Callable[[ModelSizes], bool] = lambda sizes: True

    @property
    def module(self) -> str:
        """The module of the block that the parameter belongs to."""
        return self.name.rpartition(".")[0]

    @property
    def is_matrix(self) -> bool:
        return len(self.sizes_of) == 2

    @property
    def is_input(self) -> bool:
        """Whether it is a matrix that reads the residual stream. All other matrices write to the
        stream.
        """
        return self.is_matrix and not self.cut.startswith("columns")

    def shape(self, sizes: ModelSizes) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return tuple(size(sizes) for size in self.sizes_of)

    def numel(self, sizes: ModelSizes) -> int:
        return prod(self.shape(sizes))

    def is_on_all_ranks(self, sizes: ModelSizes, tp: int) -> bool:
        """Return whether each rank of tp has the whole parameter. If there are fewer key-value
        heads than ranks, each rank has all key-value heads.
        """
        return self.cut in ("stream", "each head") or (self.cut == "kv_heads" and sizes.num_kv_heads < tp)

    def rank_shape(self, sizes: ModelSizes, tp: int) -> tuple[int, int]:
        """Return rows and columns (1 for a vector) on the tp rank with the largest share."""
        rows, *cols = self.shape(sizes)
        columns = cols[0] if cols else 1
        if self.is_on_all_ranks(sizes, tp):
            return rows, columns
        if self.cut == "hidden":
            return -(-sizes.ffn_dim // tp), columns
        if self.cut == "columns of hidden":
            return rows, -(-sizes.ffn_dim // tp)
        heads = sizes.num_kv_heads if self.cut == "kv_heads" else sizes.num_heads
        share = -(-heads // tp) * sizes.head_dim
        return (rows, share) if self.cut == "columns of heads" else (share, columns)


def _dim(sizes: ModelSizes) -> int:
    return sizes.dim


def _q_dim(sizes: ModelSizes) -> int:
    return sizes.q_dim


def _kv_dim(sizes: ModelSizes) -> int:
    return sizes.kv_dim


def _head_dim(sizes: ModelSizes) -> int:
    return sizes.head_dim


def _ffn_dim(sizes: ModelSizes) -> int:
    return sizes.ffn_dim


def _has_bias(sizes: ModelSizes) -> bool:
    return sizes.qkv_bias


def _has_head_norms(sizes: ModelSizes) -> bool:
    return sizes.qk_norm


BLOCK_PARAMS = (
    BlockParam("attention_norm.weight", (_dim,), "stream", "input_layernorm.weight"),
    BlockParam("attention.q_proj.weight", (_q_dim, _dim), "heads", "self_attn.q_proj.weight"),
    BlockParam("attention.q_proj.bias", (_q_dim,), "heads", "self_attn.q_proj.bias", _has_bias),
    BlockParam("attention.k_proj.weight", (_kv_dim, _dim), "kv_heads", "self_attn.k_proj.weight"),
    BlockParam("attention.k_proj.bias", (_kv_dim,), "kv_heads", "self_attn.k_proj.bias", _has_bias),
    BlockParam("attention.v_proj.weight", (_kv_dim, _dim), "kv_heads", "self_attn.v_proj.weight"),
    BlockParam("attention.v_proj.bias", (_kv_dim,), "kv_heads", "self_attn.v_proj.bias", _has_bias),
    BlockParam("attention.out_proj.weight", (_dim, _q_dim), "columns of heads", "self_attn.o_proj.weight"),
    BlockParam("attention.q_norm.weight", (_head_dim,), "each head", "self_attn.q_norm.weight", _has_head_norms),
    BlockParam("attention.k_norm.weight", (_head_dim,), "each head", "self_attn.k_norm.weight", _has_head_norms),
    BlockParam("ffn_norm.weight", (_dim,), "stream", "post_attention_layernorm.weight"),
    BlockParam("ffn.gate_proj.weight", (_ffn_dim, _dim), "hidden", "mlp.gate_proj.weight"),
    BlockParam("ffn.up_proj.weight", (_ffn_dim, _dim), "hidden", "mlp.up_proj.weight"),
    BlockParam("ffn.down_proj.weight", (_dim, _ffn_dim), "columns of hidden", "mlp.down_proj.weight"),
)
"""All parameters that a block may have, in the order of its modules."""


def block_params(sizes: ModelSizes) -> list[BlockParam]:
    """Return the parameters of a model's block, in the order of `Block.named_parameters()`."""
    return [param for param in BLOCK_PARAMS if param.exists(sizes)]
