"""FLOPs of training, by formula. A multiply-add counts as two operations. No torch here.

Forward and backward of one token, with N weights in matrix products, L layers, H heads of size E
and S positions:

    6 N + 12 L H E S    attention as if every position saw all S positions: the convention of PaLM
    (2204.02311,
                        appendix B) and of most published MFU figures; causal attention needs half
                        of the second term

In a mixture of experts N counts the router, the shared experts and the chosen experts of a layer.
In latent attention, where queries and keys have size E and values size W, E + W replaces 2 E.

Each extra depth of multi-token prediction adds one layer, the product that joins token and stream,
and the head.

In a layer with a sliding window, W (2 - W / S) replaces S, where W is the size of the window.

The embedding's lookup, norms, softmax and RoPE are not counted; a tied table counts once, as the
head. At dim 4096 and S = 8192 (the 8b preset) the formula gives 57.9 GFLOP per token. If the
backward recomputes anything, it also recomputes attention scores, because no fused kernel stores
them.
"""

from collections import Counter
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
    kinds = Counter(_kind(sizes, layer, seq_len) for layer in range(sizes.num_layers))
    layers = [(count, _layer_flops(sizes, *kind, recompute)) for kind, count in kinds.items()]
    if sizes.predict is not None:
        layers.append((sizes.num_depths, _depth_flops(sizes, seq_len, recompute)))
    return Flops(
        matmul=sum(count * layer.matmul for count, layer in layers)
        + _head_flops(sizes) * (1 + sizes.num_depths),
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
    kinds = [_kind(sizes, layer, seq_len) for layer in range(sizes.num_layers)]
    costs = {
        kind: _layer_flops(sizes, *kind, recompute).hardware * sizes.num_layers / of_layers
        for kind in set(kinds)
    }
    layers = tuple(1.0 if len(costs) == 1 else costs[kind] for kind in kinds)
    return LayerCosts(layers, head * sizes.num_layers / of_layers)


def _kind(sizes: ModelSizes, layer: int, seq_len: int) -> tuple[bool, float]:
    """Return whether a layer has experts, and the number of positions that count as seen by each.

    Half of this number is what a position sees on average: in a window of W positions W - W^2 / 2 S
    of S.
    """
    window = min(sizes.decoder.window_of(layer) or seq_len, seq_len)
    return sizes.has_experts(layer), window * (2 - window / seq_len)


def _head_flops(sizes: ModelSizes) -> float:
    """Return the operations of the head; a tied table counts as the head."""
    return 6.0 * sizes.vocab_size * sizes.dim


def _depth_flops(sizes: ModelSizes, seq_len: int, recompute: Recompute) -> Flops:
    """Return the operations per token of one extra depth, without the head. All positions are
    computed, also the last ones, which have no target.
    """
    return _layer_flops(sizes, sizes.experts is not None, seq_len, recompute, predicts=True)


def _layer_flops(
    sizes: ModelSizes,
    has_experts: bool,
    num_seen: float,
    recompute: Recompute,
    *,
    predicts: bool = False,
) -> Flops:
    """Return the operations per token of one layer, in which each position counts as seeing
    `num_seen` positions.
    """
    params = block_params(sizes, has_experts=has_experts, predicts=predicts)
    matrices = [param for param in params if param.is_matrix]
    # Operations of the scores, of the values that they weight, and of the zeros behind the values.
    scores = 2.0 * sizes.num_heads * sizes.head_dim * num_seen
    values = 2.0 * sizes.num_heads * sizes.value_dim * num_seen
    zeros = scores - values
    # A norm behind the layer's last product needs its result.
    is_whole = (predicts or sizes.decoder.norms_outputs) and recompute == "full"
    repeated = sum(
        param.active_numel(sizes)
        for param in matrices
        if is_whole or _is_repeated(param, recompute)
    )
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
