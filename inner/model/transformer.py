"""A decoder whose code knows nothing of ranks. What distinguishes it from Llama is in
`sizes.decoder`.

Shape suffixes: B sequences, S positions, V vocabulary, D dim, H heads, K key-value heads, E head
size, X all heads of a position. A parameter's full name does not depend on the parallel layout:
layers.<number>.<module>.weight. Parallelism replaces plain attributes: Attention.attend and
.kv_heads, Head.cross_entropy.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inner.data.micro_batch import Ahead, Packing
from inner.model.attention import Attend, causal_attention
from inner.model.dropout import ATTENTION, EMBEDDING, FEED_FORWARD, Dropout, Masks, drop
from inner.model.experts import Mixture, mixtures
from inner.model.feed_forward import FeedForward
from inner.model.latent_attention import LatentAttention
from inner.model.loss import LOSS_CHUNK, ChunkedCrossEntropy, soft_cap
from inner.model.norms import build_norm
from inner.model.predict import Joint, add_gradient, join
from inner.model.rope import has_window_rope_table, rope_table, rotate, window_rope_table
from inner.model.sizes import ModelSizes
from inner.model.span_attention import build_rule
from inner.model.stage import Stage

CrossEntropy = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_TD, weight_VD, targets_T) -> summed loss, 0-dim fp32."""


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key-value head."""

    def __init__(self, sizes: ModelSizes, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.dim, sizes.q_dim, bias=sizes.qkv_bias)
        self.k_proj = nn.Linear(sizes.dim, sizes.kv_dim, bias=sizes.qkv_bias)
        self.v_proj = nn.Linear(sizes.dim, sizes.kv_dim, bias=sizes.qkv_bias)
        self.out_proj = nn.Linear(sizes.q_dim, sizes.dim, bias=sizes.decoder.out_bias)
        self.norms_heads = sizes.qk_norm is True
        """Whether the norms take each head by itself, and not all heads of a position together."""
        (q_dim, k_dim) = sizes.normed_dims
        self.q_norm = build_norm(sizes, q_dim) if sizes.qk_norm else None
        self.k_norm = build_norm(sizes, k_dim) if sizes.qk_norm else None
        self.has_rope = sizes.decoder.has_rope(layer)
        self.query_factor = sizes.query_factor
        self.rule = build_rule(sizes, layer)
        self.attend: Attend = causal_attention
        self.kv_heads: slice | None = None
        """The projected key-value heads that this rank's query heads read. None: all heads."""

    def forward(self, x_BSD: Tensor, rope_2SE: Tensor, packing: Packing | None = None) -> Tensor:
        q_BSX = self.q_proj(x_BSD)
        k_BSX = self.k_proj(x_BSD)
        if self.q_norm is not None and self.k_norm is not None and not self.norms_heads:
            q_BSX = self.q_norm(q_BSX)
            k_BSX = self.k_norm(k_BSX)
        q_BSHE = q_BSX.unflatten(-1, (-1, self.head_dim))
        k_BSKE = k_BSX.unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.v_proj(x_BSD).unflatten(-1, (-1, self.head_dim))
        if self.kv_heads is not None:
            k_BSKE = k_BSKE[:, :, self.kv_heads]
            v_BSKE = v_BSKE[:, :, self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None and self.norms_heads:
            q_BSHE = self.q_norm(q_BSHE)
            k_BSKE = self.k_norm(k_BSKE)
        if self.has_rope:
            q_BSHE = rotate(q_BSHE, rope_2SE)
            k_BSKE = rotate(k_BSKE, rope_2SE)
        if self.query_factor != 1.0:
            q_BSHE = q_BSHE * self.query_factor
        return self.out_proj(self.attend(q_BSHE, k_BSKE, v_BSKE, packing, self.rule).flatten(-2))


class Block(nn.Module):
    """One layer: attention and feed-forward, each with a norm and added to the residual stream."""

    def __init__(self, sizes: ModelSizes, layer: int = 0) -> None:
        """Build the block with number `layer` of the whole model."""
        super().__init__()
        decoder = sizes.decoder
        self.is_parallel = decoder.parallel is not None
        self.attention_norm = build_norm(sizes, sizes.dim) if decoder.norms_inputs else None
        self.attention = Attention(sizes, layer) if sizes.latent is None else LatentAttention(sizes)
        self.attention_out_norm = build_norm(sizes, sizes.dim) if decoder.norms_outputs else None
        self.ffn_norm = build_norm(sizes, sizes.dim) if decoder.has_ffn_norm else None
        is_mixture = sizes.has_experts(layer)
        self.ffn = (
            Mixture(sizes, layer) if is_mixture else FeedForward(sizes.dim, sizes.ffn_dim, decoder)
        )
        self.ffn_out_norm = build_norm(sizes, sizes.dim) if decoder.norms_outputs else None
        self.joint = Joint(sizes) if layer in sizes.predicting_layers else None

    def forward(
        self,
        x_BSD: Tensor,
        rope_2SE: Tensor,
        packing: Packing | None = None,
        is_input_BS: Tensor | None = None,
        embedded_BSD: Tensor | None = None,
        masks: Masks | None = None,
    ) -> Tensor:
        """Return the stream after this layer. Only a mixture of experts uses `is_input_BS`: see
        Mixture. `masks`: dropout after attention and feed-forward; None: no dropout.

        The block of an extra depth gets what the head read one depth before, and the embedded
        tokens of the depth. It returns what the head reads.
        """
        if self.joint is None:
            return self._layer(x_BSD, rope_2SE, packing, is_input_BS, masks)
        assert embedded_BSD is not None, "an extra depth reads further tokens"
        joined_BSD = self.joint(drop(embedded_BSD, masks, EMBEDDING), x_BSD)
        return self.joint.norm(self._layer(joined_BSD, rope_2SE, packing, is_input_BS, masks))

    def _layer(
        self,
        x_BSD: Tensor,
        rope_2SE: Tensor,
        packing: Packing | None,
        is_input_BS: Tensor | None,
        masks: Masks | None,
    ) -> Tensor:
        read_BSD = _norm(self.attention_norm, x_BSD)
        attended_BSD = _norm(self.attention_out_norm, self.attention(read_BSD, rope_2SE, packing))
        branch_BSD = drop(attended_BSD, masks, ATTENTION)
        if not self.is_parallel:
            x_BSD = x_BSD + branch_BSD
        if self.ffn_norm is not None or not self.is_parallel:
            read_BSD = _norm(self.ffn_norm, x_BSD)
        inputs = (read_BSD, is_input_BS) if isinstance(self.ffn, Mixture) else (read_BSD,)
        second_BSD = drop(_norm(self.ffn_out_norm, self.ffn(*inputs)), masks, FEED_FORWARD)
        return x_BSD + (branch_BSD + second_BSD if self.is_parallel else second_BSD)


class Head(nn.Module):
    """Output head. It has its own weight unless it is tied to the embedding."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        # A tied head reads the embedding's weight. A second Parameter would become a separate
        # tensor in to_empty().
        self.weight = (
            None if sizes.tie_embeddings else nn.Parameter(torch.empty(sizes.vocab_size, sizes.dim))
        )
        self.scale = sizes.decoder.logit_scale
        self.cap = sizes.decoder.logit_cap
        self.cross_entropy: CrossEntropy = ChunkedCrossEntropy(LOSS_CHUNK, cap=self.cap)

    def forward(
        self, x_BSD: Tensor, tied_VD: Tensor | None, targets_BS: Tensor | None, num_losses: int = 1
    ) -> Tensor:
        """Return the loss summed over valid targets (0-dim fp32), or logits (B, S, V) without
        targets.

        With several losses, the sequences are those of one loss after the other, and the result is
        (num_losses,).
        """
        weight_VD = tied_VD if self.weight is None else self.weight
        assert weight_VD is not None, "a tied head needs the embedding's table"
        if self.scale is not None:
            x_BSD = x_BSD * self.scale
        if targets_BS is None:
            return soft_cap(F.linear(x_BSD, weight_VD), self.cap)
        if num_losses == 1:
            return self.cross_entropy(x_BSD.flatten(0, 1), weight_VD, targets_BS.flatten())
        parts = zip(x_BSD.chunk(num_losses), targets_BS.chunk(num_losses), strict=True)
        return torch.stack(
            [self.cross_entropy(x.flatten(0, 1), weight_VD, part.flatten()) for x, part in parts]
        )


class Transformer(nn.Module):
    """The model, or one pipeline stage of it. Build it on the meta device, then call
    `initialise`.
    """

    rope_2SE: Tensor
    window_rope_2SE: Tensor | None
    """RoPE's table of layers with a window, if it is another."""
    positions_S: Tensor | None
    """Positions of the inputs, int64, if vectors are learned for them."""

    def __init__(
        self,
        sizes: ModelSizes,
        positions_S: Tensor,
        stage: Stage | None = None,
        seq_len: int | None = None,
    ) -> None:
        """Build modules without values. `positions_S`: positions of the inputs in a sequence of
        `seq_len`, int64 on the CPU. If `seq_len` is None, the positions are the whole sequence.
        """
        super().__init__()
        self.sizes = sizes
        self.stage = stage = stage or Stage(0, range(sizes.num_layers), is_first=True, is_last=True)
        has_table = stage.is_first or (stage.is_last and sizes.last_stage_embeds)
        self.embed = nn.Embedding(sizes.vocab_size, sizes.dim) if has_table else None
        num_learned = sizes.decoder.max_positions if stage.is_first else None
        self.position = None if num_learned is None else nn.Embedding(num_learned, sizes.dim)
        numbers = [*stage.layers, *(sizes.predicting_layers if stage.is_last else ())]
        self.layers = nn.ModuleDict({str(number): Block(sizes, number) for number in numbers})
        self.norm = build_norm(sizes, sizes.dim) if stage.is_last else None
        self.head = Head(sizes) if stage.is_last else None
        self.depth_sums_2P: Tensor | None = None
        """Where the extra depths add their losses in a training step: see recording_depths."""
        self._positions_S = positions_S
        self._seq_len = len(positions_S) if seq_len is None else seq_len
        self.register_buffer(
            "rope_2SE", torch.empty(2, len(positions_S), sizes.rope_dim), persistent=False
        )
        has_window_rope = has_window_rope_table(sizes)
        window_rope_2SE = torch.empty_like(self.rope_2SE) if has_window_rope else None
        self.register_buffer("window_rope_2SE", window_rope_2SE, persistent=False)
        learned_S = (
            None if self.position is None else torch.empty(len(positions_S), dtype=torch.int64)
        )
        self.register_buffer("positions_S", learned_S, persistent=False)

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks of the stage, also those of extra depths."""
        for layer in self.layers.values():
            assert isinstance(layer, Block)
            yield layer

    def set_positions(self, positions_S: Tensor) -> None:
        """Compute with inputs at these positions from now on: int64, on the CPU.

        RoPE's frequencies remain those of the longest sequence.
        """
        self._positions_S = positions_S
        device = self.rope_2SE.device
        for name, table in self._tables():
            setattr(self, name, table.to(device))

    def fill_tables(self) -> None:
        """Compute RoPE's table in fp32, and set the routers' biases to 0. Call it after
        to_empty().
        """
        for name, table in self._tables():
            getattr(self, name).copy_(table)
        for mixture in mixtures([self]):
            mixture.router.bias.zero_()

    def _tables(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers that follow from the positions, by name, on the CPU."""
        yield "rope_2SE", rope_table(self.sizes, self._positions_S, self._seq_len)
        if self.window_rope_2SE is not None:
            yield "window_rope_2SE", window_rope_table(self.sizes, self._positions_S, self._seq_len)
        if self.positions_S is not None:
            yield "positions_S", self._positions_S

    def rope_of(self, layer: int) -> Tensor:
        """Return RoPE's table for a layer, (2, S, E)."""
        has_window = (
            self.window_rope_2SE is not None and self.sizes.decoder.window_of(layer) is not None
        )
        table_2SE = self.window_rope_2SE if has_window else self.rope_2SE
        assert table_2SE is not None, "a table of its own was made for layers with a window"
        return table_2SE

    def forward(
        self,
        x: Tensor,
        *,
        targets_BS: Tensor | None = None,
        packing: Packing | None = None,
        tokens_BS: Tensor | None = None,
        ahead: Ahead | None = None,
        dropout: Dropout | None = None,
    ) -> Tensor:
        """Map tokens (B, S), or a stage's input (B, S, D), to the summed loss, the logits or the
        stage's output.

        Token ids below 0 are padding. S may be smaller than the number of positions that the model
        was built for. A stage with experts also needs the tokens if they are not its input. The
        loss is that of the next tokens; with `ahead` its backward is also that of the extra depths.
        """
        is_input_BS: Tensor | None = None
        if self.sizes.experts is not None:
            is_input_BS = (x if self.stage.is_first else _given(tokens_BS)) >= 0
        embedded = self._embed_all(x, ahead)
        x_BSD = drop(embedded.pop(0), _at(dropout, 0), EMBEDDING) if self.stage.is_first else x
        for number in self.stage.layers:
            layer = self.layers[str(number)]
            x_BSD = layer(
                x_BSD, self.rope_of(number), packing, is_input_BS, None, _at(dropout, number)
            )
        if self.norm is None or self.head is None:
            return x_BSD
        table_VD = None if self.embed is None or self.head.weight is not None else self.embed.weight
        if ahead is None:
            return self.head(self.norm(x_BSD), table_VD, targets_BS)
        assert targets_BS is not None, "extra depths have only losses"
        (x_BSD, *embedded) = join((x_BSD, *embedded, *([] if table_VD is None else [table_VD])))
        table_VD = None if table_VD is None else embedded.pop()
        read = list(self._read_all(x_BSD, embedded, packing, ahead, dropout))
        targets = torch.cat((targets_BS, ahead.targets_PBS.flatten(0, 1)))
        return self._add_depths(self.head(torch.cat(read), table_VD, targets, len(read)), ahead)

    def _embed_all(self, x: Tensor, ahead: Ahead | None) -> list[Tensor]:
        """Return the embedded input tokens, if this is the first stage, and those of each extra
        depth.

        One call looks all of them up, because FSDP gathers the table for each call.
        """
        tokens = [x] if self.stage.is_first else []
        tokens += [] if ahead is None else ahead.tokens_PBS.unbind()
        if self.embed is None or not tokens:
            return []
        tokens_BS = torch.cat(tokens) if len(tokens) > 1 else tokens[0]
        embedded_BSD = self.embed_tokens(tokens_BS)
        return list(embedded_BSD.chunk(len(tokens))) if len(tokens) > 1 else [embedded_BSD]

    def embed_tokens(self, tokens_BS: Tensor, begin: int = 0) -> Tensor:
        """Return the embedded tokens, the first of which is at place `begin` of the positions."""
        assert self.embed is not None, "the stage has the embedding"
        # The embedding needs a valid index also for padding.
        embedded_BSD = self.embed(tokens_BS.clamp(min=0))
        if self.sizes.decoder.embed_scale is not None:
            embedded_BSD = embedded_BSD * self.sizes.decoder.embed_scale
        if self.position is None or self.positions_S is None:
            return embedded_BSD
        return embedded_BSD + self.position(self.positions_S[begin : begin + tokens_BS.shape[1]])

    def _read_all(
        self,
        x_BSD: Tensor,
        embedded: list[Tensor],
        packing: Packing | None,
        ahead: Ahead,
        dropout: Dropout | None,
    ) -> Iterator[Tensor]:
        """Yield what the head reads for the next token, and at each extra depth."""
        assert self.norm is not None, "the last stage has the last norm"
        read_BSD = self.norm(x_BSD)
        yield read_BSD
        is_input_PBS = ahead.tokens_PBS >= 0
        for depth, number in enumerate(self.sizes.predicting_layers):
            layer = self.layers[str(number)]
            masks = _at(dropout, number)
            read_BSD = layer(
                read_BSD, self.rope_2SE, packing, is_input_PBS[depth], embedded[depth], masks
            )
            yield read_BSD

    def _add_depths(self, losses: Tensor, ahead: Ahead) -> Tensor:
        """Return the main loss, the first of `losses` (1 + P), with the gradient of all."""
        assert self.sizes.predict is not None, "only multi-token prediction has several losses"
        losses_P = losses[1:]
        if self.depth_sums_2P is not None:
            counts_P = (ahead.targets_PBS >= 0).sum(dim=(1, 2))
            self.depth_sums_2P += torch.stack((losses_P.detach().double(), counts_P.double()))
        return add_gradient(losses[0], self.sizes.predict.weight * losses_P.mean())


def _norm(norm: nn.Module | None, x_BSD: Tensor) -> Tensor:
    """Return x normed, or x itself if there is no norm at this place."""
    return x_BSD if norm is None else norm(x_BSD)


def _at(dropout: Dropout | None, layer: int) -> Masks | None:
    return None if dropout is None else dropout.at(layer)


def _given(tokens_BS: Tensor | None) -> Tensor:
    assert tokens_BS is not None, "a stage with experts must know which positions are padding"
    return tokens_BS
