"""The parameters of a decoder block: their shapes, and how tensor parallelism cuts each of them. No
torch here.

Other facts about a model's parameters follow from this list: their number and specs, a rank's
share, FLOPs, placements, and their names in Hugging Face's files. To add a parameter for a family
of models, add a line here and a module with the same name in transformer.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from inner.config import ExpertsConfig, LatentConfig
from inner.model.sizes import ModelSizes

Cut = Literal[
    "heads",
    "kv_heads",
    "hidden",
    "columns of heads",
    "columns of hidden",
    "stream",
    "each head",
    "latent",
    "experts",
]
"""What the ranks of tp divide among them: rows or columns of a matrix, by heads or by hidden units.

    stream       nothing: the parameter acts on positions of the residual stream, which sequence
                 parallelism divides
    each head    nothing: the parameter acts on each head, and the heads are divided. A norm of all
                 heads together is not possible under tensor parallelism
    latent       nothing: all heads read the narrow vector that the parameter computes or norms
    experts      nothing: the ranks divide the positions, and every expert may be chosen at each of
                 them
"""
Place = Literal["every block", "dense blocks", "blocks with experts", "extra depths"]
"""The blocks that have a parameter. A block is dense unless its feed-forward is a mixture of
experts. Those of extra depths are of either kind, and predict further tokens."""
Size = Callable[[ModelSizes], int]
Exists = Callable[[ModelSizes], bool]


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
    exists: Exists = lambda sizes: True
    place: Place = "every block"

    @property
    def is_stacked(self) -> bool:
        """Whether the module has one such parameter per expert, all of them in one tensor."""
        return self.name.startswith(EXPERTS)

    def num_copies(self, sizes: ModelSizes) -> int:
        """Return the number of such parameters in one block: one, or one per expert."""
        return sizes.experts.number if self.is_stacked and sizes.experts is not None else 1

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
        """Return the shape of the whole parameter; of a single expert's, if there are several."""
        return tuple(size(sizes) for size in self.sizes_of)

    def numel(self, sizes: ModelSizes) -> int:
        """Return the number of elements; of all experts, if there are several."""
        return self.num_copies(sizes) * prod(self.shape(sizes))

    def active_numel(self, sizes: ModelSizes) -> int:
        """Return the number of elements that one token uses: of the experts only the chosen."""
        chosen = sizes.experts.per_token if self.is_stacked and sizes.experts is not None else 1
        return chosen * prod(self.shape(sizes))

    def is_on_all_ranks(self, sizes: ModelSizes, tp: int) -> bool:
        """Return whether each rank of tp has the whole parameter. If there are fewer key-value
        heads than ranks, each rank has all key-value heads.
        """
        return self.cut in ("stream", "each head", "latent", "experts") or (
            self.cut == "kv_heads" and sizes.num_kv_heads < tp
        )

    def rank_shape(self, sizes: ModelSizes, tp: int) -> tuple[int, int]:
        """Return rows and columns (1 for a vector) on the tp rank with the largest share.

        The tensor of all experts is seen as a matrix with a row per expert.
        """
        rows, *cols = self.shape(sizes)
        columns = cols[0] if cols else 1
        if self.is_stacked:
            return self.num_copies(sizes), rows * columns
        if self.is_on_all_ranks(sizes, tp):
            return rows, columns
        if self.cut == "hidden":
            return -(-rows // tp), columns
        if self.cut == "columns of hidden":
            return rows, -(-columns // tp)
        heads = sizes.num_kv_heads if self.cut == "kv_heads" else sizes.num_heads
        mine = -(-heads // tp)
        if self.cut == "columns of heads":
            return rows, mine * (columns // heads)
        return mine * (rows // heads), columns


EXPERTS = "ffn.experts."
"""Beginning of the names of parameters of which each expert has one."""
ROUTER = "ffn.router"
"""The module that chooses the experts. It computes in fp32, whatever the compute dtype."""


def _dim(sizes: ModelSizes) -> int:
    return sizes.dim


def _two_dims(sizes: ModelSizes) -> int:
    return 2 * sizes.dim


def _q_dim(sizes: ModelSizes) -> int:
    return sizes.q_dim


def _kv_dim(sizes: ModelSizes) -> int:
    return sizes.kv_dim


def _attended_dim(sizes: ModelSizes) -> int:
    return sizes.attended_dim


def _normed_q_dim(sizes: ModelSizes) -> int:
    return sizes.normed_dims[0]


def _normed_k_dim(sizes: ModelSizes) -> int:
    return sizes.normed_dims[1]


def _ffn_dim(sizes: ModelSizes) -> int:
    return sizes.ffn_dim


def _q_rank(sizes: ModelSizes) -> int:
    return _latent(sizes).q_rank or 0


def _kv_rank(sizes: ModelSizes) -> int:
    return _latent(sizes).kv_rank


def _kv_and_rope(sizes: ModelSizes) -> int:
    latent = _latent(sizes)
    return latent.kv_rank + latent.rope_dim


def _keys_and_values(sizes: ModelSizes) -> int:
    latent = _latent(sizes)
    return sizes.num_heads * (latent.nope_dim + latent.value_dim)


def _num_experts(sizes: ModelSizes) -> int:
    return _experts(sizes).number


def _expert_dim(sizes: ModelSizes) -> int:
    return _experts(sizes).dim


def _shared_dim(sizes: ModelSizes) -> int:
    experts = _experts(sizes)
    return experts.shared * experts.dim


def _latent(sizes: ModelSizes) -> LatentConfig:
    assert sizes.latent is not None, "the parameter belongs to latent attention"
    return sizes.latent


def _experts(sizes: ModelSizes) -> ExpertsConfig:
    assert sizes.experts is not None, "the parameter belongs to a mixture of experts"
    return sizes.experts


def _has_bias(sizes: ModelSizes) -> bool:
    return sizes.qkv_bias


def _has_out_bias(sizes: ModelSizes) -> bool:
    return sizes.decoder.out_bias


def _norms_inputs(sizes: ModelSizes) -> bool:
    return sizes.decoder.norms_inputs


def _norms_outputs(sizes: ModelSizes) -> bool:
    return sizes.decoder.norms_outputs


def _has_ffn_norm(sizes: ModelSizes) -> bool:
    return sizes.decoder.has_ffn_norm


def _has_qk_norms(sizes: ModelSizes) -> bool:
    return bool(sizes.qk_norm)


def _has_q_proj(sizes: ModelSizes) -> bool:
    return sizes.latent is None or sizes.latent.q_rank is None


def _has_q_rank(sizes: ModelSizes) -> bool:
    return not _has_q_proj(sizes)


def _is_latent(sizes: ModelSizes) -> bool:
    return sizes.latent is not None


def _is_ordinary(sizes: ModelSizes) -> bool:
    return sizes.latent is None


def _has_shared(sizes: ModelSizes) -> bool:
    return sizes.experts is not None and sizes.experts.shared > 0


def _ffn(
    module: str, dim: Size, huggingface: str, exists: Exists, place: Place
) -> tuple[BlockParam, ...]:
    """Return the matrices of a feed-forward of width `dim`, and their biases."""
    is_expert = module + "." == EXPERTS
    first: Cut = "experts" if is_expert else "hidden"
    last: Cut = "experts" if is_expert else "columns of hidden"

    def has_gate(sizes: ModelSizes) -> bool:
        return exists(sizes) and sizes.decoder.gated

    def with_bias(
        name: str, shape: tuple[Size, Size], cut: Cut, has: Exists
    ) -> tuple[BlockParam, ...]:
        weight = BlockParam(
            f"{module}.{name}.weight", shape, cut, f"{huggingface}.{name}.weight", has, place
        )
        return _with_bias(weight, lambda sizes: has(sizes) and sizes.decoder.ffn_bias)

    return (
        *with_bias("gate_proj", (dim, _dim), first, has_gate),
        *with_bias("up_proj", (dim, _dim), first, exists),
        *with_bias("down_proj", (_dim, dim), last, exists),
    )


def _norm(
    name: str, huggingface: str, exists: Exists, dim: Size = _dim, cut: Cut = "stream"
) -> tuple[BlockParam, ...]:
    """Return the weight of a norm, and its bias, which only LayerNorm has."""
    weight = BlockParam(f"{name}.weight", (dim,), cut, f"{huggingface}.weight", exists)
    return _with_bias(weight, lambda sizes: exists(sizes) and sizes.decoder.has_norm_bias)


def _projection(
    name: str, shape: tuple[Size, Size], cut: Cut, exists: Exists, has_bias: Exists
) -> tuple[BlockParam, ...]:
    """Return a matrix of attention, and its bias."""
    return _with_bias(
        BlockParam(f"attention.{name}.weight", shape, cut, f"self_attn.{name}.weight", exists),
        has_bias,
    )


def _with_bias(weight: BlockParam, exists: Exists) -> tuple[BlockParam, BlockParam]:
    """Return a weight, and the bias beside it. The bias of a matrix that writes to the stream is
    added there, once.
    """
    return weight, replace(
        weight,
        name=weight.name.removesuffix("weight") + "bias",
        sizes_of=weight.sizes_of[:1],
        cut="stream" if weight.cut.startswith("columns") else weight.cut,
        huggingface=weight.huggingface.removesuffix("weight") + "bias",
        exists=exists,
    )


def _always(_: ModelSizes) -> bool:
    return True


BLOCK_PARAMS = (
    *_norm("attention_norm", "input_layernorm", _norms_inputs),
    *_projection("q_proj", (_q_dim, _dim), "heads", _has_q_proj, _has_bias),
    *_projection("k_proj", (_kv_dim, _dim), "kv_heads", _is_ordinary, _has_bias),
    *_projection("v_proj", (_kv_dim, _dim), "kv_heads", _is_ordinary, _has_bias),
    BlockParam(
        "attention.q_a_proj.weight",
        (_q_rank, _dim),
        "latent",
        "self_attn.q_a_proj.weight",
        _has_q_rank,
    ),
    BlockParam(
        "attention.q_a_norm.weight",
        (_q_rank,),
        "latent",
        "self_attn.q_a_layernorm.weight",
        _has_q_rank,
    ),
    BlockParam(
        "attention.q_b_proj.weight",
        (_q_dim, _q_rank),
        "heads",
        "self_attn.q_b_proj.weight",
        _has_q_rank,
    ),
    BlockParam(
        "attention.kv_a_proj.weight",
        (_kv_and_rope, _dim),
        "latent",
        "self_attn.kv_a_proj_with_mqa.weight",
        _is_latent,
    ),
    BlockParam(
        "attention.kv_a_norm.weight",
        (_kv_rank,),
        "latent",
        "self_attn.kv_a_layernorm.weight",
        _is_latent,
    ),
    BlockParam(
        "attention.kv_b_proj.weight",
        (_keys_and_values, _kv_rank),
        "heads",
        "self_attn.kv_b_proj.weight",
        _is_latent,
    ),
    *_with_bias(
        BlockParam(
            "attention.out_proj.weight",
            (_dim, _attended_dim),
            "columns of heads",
            "self_attn.o_proj.weight",
        ),
        _has_out_bias,
    ),
    *_norm("attention.q_norm", "self_attn.q_norm", _has_qk_norms, _normed_q_dim, "each head"),
    *_norm("attention.k_norm", "self_attn.k_norm", _has_qk_norms, _normed_k_dim, "each head"),
    *_norm("attention_out_norm", "post_attention_layernorm", _norms_outputs),
    *_norm("ffn_norm", "post_attention_layernorm", _has_ffn_norm),
    *_ffn("ffn", _ffn_dim, "mlp", _always, "dense blocks"),
    BlockParam(
        "ffn.router.weight",
        (_num_experts, _dim),
        "experts",
        "mlp.gate.weight",
        place="blocks with experts",
    ),
    *_ffn("ffn.experts", _expert_dim, "mlp.experts.{}", _always, "blocks with experts"),
    *_ffn("ffn.shared", _shared_dim, "mlp.shared_experts", _has_shared, "blocks with experts"),
    *_norm("ffn_out_norm", "post_feedforward_layernorm", _norms_outputs),
    BlockParam("joint.token_norm.weight", (_dim,), "stream", "enorm.weight", place="extra depths"),
    BlockParam("joint.stream_norm.weight", (_dim,), "stream", "hnorm.weight", place="extra depths"),
    BlockParam(
        "joint.proj.weight", (_dim, _two_dims), "stream", "eh_proj.weight", place="extra depths"
    ),
    BlockParam(
        "joint.norm.weight", (_dim,), "stream", "shared_head.norm.weight", place="extra depths"
    ),
)
"""All parameters that a block may have, in the order of its modules."""


def block_params(
    sizes: ModelSizes, *, has_experts: bool, predicts: bool = False
) -> list[BlockParam]:
    """Return the parameters of one of a model's blocks, in the order of `Block.named_parameters()`.

    `has_experts`: whether the block's feed-forward is a mixture of experts. `predicts`: whether the
    block belongs to an extra depth of multi-token prediction.
    """
    others = {
        "dense blocks" if has_experts else "blocks with experts",
        "" if predicts else "extra depths",
    }
    return [param for param in BLOCK_PARAMS if param.place not in others and param.exists(sizes)]
