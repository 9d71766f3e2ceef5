"""FLOPs of training, by formula. A multiply-add counts as two operations. No torch here.

Forward and backward of one token, with N weights in matrix products, L layers, H heads of size E
and S positions:

    6 N + 12 L H E S    attention as if every position saw all S positions: the convention of PaLM (2204.02311,
                        appendix B) and of most published MFU figures; causal attention needs half of the second term

In a mixture of experts N counts the router, the shared experts and the chosen experts of a layer.
In latent attention, where queries and keys have size E and values size W, E + W replaces 2 E.

Each extra depth of multi-token prediction adds one layer, the product that joins token and stream,
and the head.

The embedding's lookup, norms, softmax and RoPE are not counted; a tied table counts once, as the
head. At dim 4096 and S = 8192 (the 8b preset) the formula gives 57.9 GFLOP per token. If the
backward recomputes anything, it also recomputes attention scores, because no fused kernel stores
them.
"""

from dataclasses import dataclass, replace

from inner.config import Recompute
from inner.model.block_params import BlockParam, block_params
from inner.model.sizes import ModelSizes


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token, forward and backward."""

    matmul: float
    attention: float
    """Operations of attention scores and of the sums of values that they weight."""
    recomputed: float
    padding: float = 0.0
    """Operations on the zeros with which latent attention pads values to the size of keys."""

    @property
    def total(self) -> float:
        """Operations that the model itself requires: the numerator of MFU."""
        return self.matmul + self.attention

    @property
    def hardware(self) -> float:
        """Operations that are executed: the numerator of HFU."""
        return self.total + self.recomputed + self.padding


@dataclass(frozen=True)
class LayerCosts:
    """What the layers and the head of a model cost, as multiples of the mean layer."""

    layers: tuple[float, ...]
    head: float
    """Cost of the head, and of the extra depths, which are on its stage."""

    @property
    def is_even(self) -> bool:
        """Whether all layers cost the same."""
        return len(set(self.layers)) == 1


def flops_per_token(sizes: ModelSizes, seq_len: int, recompute: Recompute = "none") -> Flops:
    """Return the operations per token in a sequence of `seq_len`, by PaLM's convention."""
    layers = [
        (count, _layer_flops(sizes, has_experts, seq_len, recompute))
        for has_experts, count in sizes.layer_kinds(range(sizes.num_layers))
    ]
    if sizes.predict is not None:
        layers.append((sizes.num_depths, _depth_flops(sizes, seq_len, recompute)))
    return Flops(
        matmul=sum(count * layer.matmul for count, layer in layers) + _head_flops(sizes) * (1 + sizes.num_depths),
        attention=sum(count * layer.attention for count, layer in layers),
        recomputed=sum(count * layer.recomputed for count, layer in layers),
        padding=sum(count * layer.padding for count, layer in layers),
    )


def layer_costs(sizes: ModelSizes, seq_len: int, recompute: Recompute = "none") -> LayerCosts:
    """Return the operations of each layer and of the head, with recomputation, divided by those of
    the mean layer.

    The head costs 1.8 layers for the 8b preset at 8192 positions, 3.7 for 1b at 2048, and 0.03 for
    1m, whose vocabulary is bytes.
    """
    head = _head_flops(sizes)
    of_layers = flops_per_token(replace(sizes, predict=None), seq_len, recompute).hardware - head
    if sizes.predict is not None:
        head += sizes.num_depths * (head + _depth_flops(sizes, seq_len, recompute).hardware)
    kinds = sizes.layer_kinds(range(sizes.num_layers))
    layers: list[float] = []
    for has_experts, count in kinds:
        cost = _layer_flops(sizes, has_experts, seq_len, recompute).hardware * sizes.num_layers / of_layers
        layers += [1.0 if len(kinds) == 1 else cost] * count
    return LayerCosts(tuple(layers), head * sizes.num_layers / of_layers)


def _head_flops(sizes: ModelSizes) -> float:
    """Return the operations of the head; a tied table counts as the head."""
    return 6.0 * sizes.vocab_size * sizes.dim


def _depth_flops(sizes: ModelSizes, seq_len: int, recompute: Recompute) -> Flops:
    """Return the operations per token of one extra depth, without the head. All positions are computed,
    also the last ones, which have no target.
    """
    return _layer_flops(sizes, sizes.experts is not None, seq_len, recompute, predicts=True)


def _layer_flops(
    sizes: ModelSizes, has_experts: bool, seq_len: int, recompute: Recompute, *, predicts: bool = False
) -> Flops:
    """Return the operations per token of one layer."""
    params = block_params(sizes, has_experts=has_experts, predicts=predicts)
    matrices = [param for param in params if param.is_matrix]
    # Operations of the scores, of the values that they weight, and of the zeros behind the values.
    scores = 2.0 * sizes.num_heads * sizes.head_dim * seq_len
    values = 2.0 * sizes.num_heads * sizes.value_dim * seq_len
    zeros = scores - values
    # The last norm of an extra depth needs the result of the layer's last product.
    is_whole = predicts and recompute == "full"
    repeated = sum(param.active_numel(sizes) for param in matrices if is_whole or _is_repeated(param, recompute))
    attends_again = recompute in ("attention", "full")
    return Flops(
        matmul=6.0 * sum(param.active_numel(sizes) for param in matrices),
        attention=3.0 * (scores + values),
        recomputed=scores + (scores + values) * attends_again + 2.0 * repeated,
        padding=zeros * (3 + attends_again),
    )


def _is_repeated(param: BlockParam, recompute: Recompute) -> bool:
    """Return whether a layer's backward repeats the product with this matrix. It does not repeat a
    product whose result it does not need: the last of attention, and the last of a block, unless a
    router weights it.
    """
    in_attention = param.module.startswith("attention.")
    if recompute == "attention":
        return in_attention and param.is_input
    return recompute == "full" and (in_attention or param.is_input or param.is_stacked)
