"""Text generation, one token at a time, with a key-value cache."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inner.data.micro_batch import Packing
from inner.data.tokenizer import Tokenizer
from inner.errors import InputError
from inner.model.attention import causal_attention
from inner.model.span_attention import ScoreRule, build_spans, span_forward
from inner.model.transformer import Transformer

UNFINISHED = "\ufffd"
"""The character that a tokenizer returns for an incomplete character."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 1.0
    """Divides the logits; 0: always take the best token."""
    top_k: int | None = None
    """Draw from this number of best tokens only. None: from all tokens."""
    top_p: float | None = None
    """Draw only from the smallest set of best tokens whose probabilities sum to at least this.
    None: from all tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(
                f"temperature is {self.temperature}; allowed: 0 (always the best token) and above"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}; allowed: 1 and above, or none")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; allowed: above 0 and up to 1, or none")


class KeyValueCache:
    """Key-value cache of one attention layer and one batch of sequences. It replaces
    `Attention.attend`.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._length = 0
        self._kept_2BTKE: Tensor | None = None

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        packing: Packing | None = None,
        rule: ScoreRule | None = None,
    ) -> Tensor:
        """Return the attention of the new positions to all positions. The first call may have many
        positions, later calls one.
        """
        assert packing is None, "the cache does not support documents"
        num_new = q_BSHE.shape[1]
        if self._kept_2BTKE is None:
            batch, _, heads, width = k_BSKE.shape
            self._kept_2BTKE = k_BSKE.new_empty(2, batch, self._num_positions, heads, width)
        begin = self._length
        self._length = self._length + num_new
        assert begin == 0 or num_new == 1, f"{num_new} positions after the first {begin}"
        self._kept_2BTKE[0, :, begin : self._length] = k_BSKE
        self._kept_2BTKE[1, :, begin : self._length] = v_BSKE
        if begin == 0:
            return causal_attention(q_BSHE, k_BSKE, v_BSKE, None, rule)
        k_BKTE, v_BKTE = self._kept_2BTKE[:, :, : self._length].transpose(2, 3)
        if rule is not None:
            spans = build_spans(
                torch.tensor([begin]), torch.arange(self._length), None, rule.window
            )
            y_BHSE, _ = span_forward(q_BSHE.transpose(1, 2), k_BKTE, v_BKTE, spans, rule)
            return y_BHSE.transpose(1, 2)
        y_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2), k_BKTE, v_BKTE, enable_gqa=True
        )
        return y_BHSE.transpose(1, 2)


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: Sampling,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield max_tokens token ids after the prompt, which has at least one id. Generation does not
    stop at eos.

    The model must have positions for prompt and new tokens. `generator` is a CPU generator on any
    device of the model.
    """
    num_positions = len(prompt) + max_tokens
    assert prompt and num_positions <= model.rope_2SE.shape[1], (
        f"{num_positions} positions, {len(prompt)} of a prompt"
    )
    attentions = [layer.attention for layer in model.blocks()]
    original_attends = [attention.attend for attention in attentions]
    for attention in attentions:
        attention.attend = KeyValueCache(num_positions)
    try:
        new = list(prompt)
        begin = 0
        for _ in range(max_tokens):
            logits_V = last_logits(model, torch.tensor([new], device=model.rope_2SE.device), begin)[
                0
            ]
            begin += len(new)
            new = [draw(logits_V.cpu(), sampling, generator)]
            yield new[0]
    finally:
        for attention, attend in zip(attentions, original_attends, strict=True):
            attention.attend = attend


def last_logits(model: Transformer, tokens_BS: Tensor, begin: int) -> Tensor:
    """Return the logits (B, V) for the token after the last of `tokens_BS`, whose positions start
    at `begin`; fp32.
    """
    assert model.embed is not None and model.norm is not None and model.head is not None, (
        "a whole model"
    )
    x_BSD = model.embed_tokens(tokens_BS, begin)
    for number, layer in model.layers.items():
        rope_2SE = model.rope_of(int(number))[:, begin : begin + tokens_BS.shape[1]]
        x_BSD = layer(x_BSD, rope_2SE)
    return model.head(model.norm(x_BSD[:, -1:]), model.embed.weight, None)[:, 0].float()


def draw(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token. Among equal logits the lowest id ranks first."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    sorted_V, order_V = logits_V.sort(descending=True, stable=True)
    # Subtract the maximum, so that nothing overflows at low temperatures.
    probs_V = ((sorted_V - sorted_V[0]) / sampling.temperature).softmax(dim=-1)
    if sampling.top_k is not None:
        probs_V[sampling.top_k :] = 0
    if sampling.top_p is not None:
        probs_V /= probs_V.sum()
        # The best token always remains, because no probability comes before it.
        probs_V[probs_V.cumsum(dim=-1) - probs_V >= sampling.top_p] = 0
    return int(order_V[torch.multinomial(probs_V, 1, generator=generator)])


def pieces_of_text(
    ids: Iterator[int], tokenizer: Tokenizer, stop_ids: Collection[int] = ()
) -> Iterator[str]:
    """Decode ids to pieces of text as they arrive, up to eos or one of `stop_ids`. A piece ends at
    the end of a character.

    Ids are decoded together with the previous piece's ids, because some tokenizers drop a leading
    space.
    """
    previous: list[int] = []
    new_ids: list[int] = []
    for token in ids:
        if token == tokenizer.eos_id or token in stop_ids:
            break
        new_ids.append(token)
        text = _decode_after(previous, new_ids, tokenizer)
        if text and not text.endswith(UNFINISHED):
            yield text
            previous = new_ids
            new_ids = []
    if rest := _decode_after(previous, new_ids, tokenizer):
        yield rest


def until(pieces: Iterator[str], end: str) -> Iterator[str]:
    """Yield the pieces up to `end`, which may extend over several pieces."""
    held = ""
    for piece in pieces:
        held += piece
        if end in held:
            yield held[: held.index(end)]
            return
        # Keep back characters that may be the beginning of `end`.
        kept = next(
            size
            for size in range(min(len(end) - 1, len(held)), -1, -1)
            if held.endswith(end[:size])
        )
        if len(held) > kept:
            yield held[: len(held) - kept]
        held = held[len(held) - kept :]
    if held:
        yield held


def _decode_after(previous: list[int], new_ids: list[int], tokenizer: Tokenizer) -> str:
    return tokenizer.decode(previous + new_ids)[len(tokenizer.decode(previous)) :]
