"""Continues text, a token at a time, with the keys and values of earlier positions kept."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inner.attention import causal_attention
from inner.data.tokenizer import Tokenizer
from inner.errors import InputError
from inner.model import Transformer

UNFINISHED = "\ufffd"
"""What a tokenizer decodes half a character to."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the model's scores."""

    temperature: float = 1.0
    """Divides the scores; 0: always the best token."""
    top_k: int | None = None
    """Only the k best tokens."""
    top_p: float | None = None
    """Only the best tokens that together have this probability; the one that reaches it is among them."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}; allowed: 0 (always the best token) and above")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}; allowed: 1 and above, or none")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; allowed: above 0 and up to 1, or none")


class Cache:
    """An attention's keys and values so far; in the place of `Attention.attend`, for one batch of sequences."""

    def __init__(self, num_positions: int) -> None:
        """`num_positions`: the most that it will hold."""
        self._num_positions = num_positions
        self._length = 0
        self._kept_2BTKE: Tensor | None = None

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """Attention of the new positions to all; the first call has any number, each later one a single position."""
        assert documents_BS is None, "the cache does not look at documents"
        num_new = q_BSHE.shape[1]
        if self._kept_2BTKE is None:
            batch, _, heads, width = k_BSKE.shape
            self._kept_2BTKE = k_BSKE.new_empty(2, batch, self._num_positions, heads, width)
        begin, self._length = self._length, self._length + num_new
        assert begin == 0 or num_new == 1, f"{num_new} positions after the first {begin}"
        self._kept_2BTKE[0, :, begin : self._length] = k_BSKE
        self._kept_2BTKE[1, :, begin : self._length] = v_BSKE
        if begin == 0:
            return causal_attention(q_BSHE, k_BSKE, v_BSKE)
        k_BTKE, v_BTKE = self._kept_2BTKE[:, :, : self._length]
        return _attend_to_all(q_BSHE, k_BTKE, v_BTKE)


def _attend_to_all(q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
    """Each position's mean of all the values, y_BSHE."""
    q_BHSE, k_BKTE, v_BKTE = q_BSHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2)
    y_BHSE = torch.nn.functional.scaled_dot_product_attention(q_BHSE, k_BKTE, v_BKTE, enable_gqa=True)
    return y_BHSE.transpose(1, 2)


@torch.no_grad()
def generate(
    model: Transformer, prompt: Sequence[int], max_tokens: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[int]:
    """Token ids that follow the prompt (at least one), without end: up to max_tokens of them, eos among them.

    The model must have positions for both. `generator`: of the CPU, whatever the model's device.
    """
    num_positions = len(prompt) + max_tokens
    assert prompt and num_positions <= model.rope_2SP.shape[1], f"{num_positions} positions, {len(prompt)} of a prompt"
    attentions = [layer.attention for layer in model.blocks()]
    were = [attention.attend for attention in attentions]
    for attention in attentions:
        attention.attend = Cache(num_positions)
    try:
        new, begin = list(prompt), 0
        for _ in range(max_tokens):
            scores_V = last_scores(model, torch.tensor([new], device=model.rope_2SP.device), begin)[0]
            begin += len(new)
            new = [draw(scores_V.cpu(), sampling, generator)]
            yield new[0]
    finally:
        for attention, attend in zip(attentions, were, strict=True):
            attention.attend = attend


def last_scores(model: Transformer, tokens_BS: Tensor, begin: int) -> Tensor:
    """Scores (B, V) of what follows the last of tokens that lie at positions `begin` and on; fp32."""
    assert model.embed is not None and model.norm is not None and model.head is not None, "a whole model"
    x_BSD = model.embed(tokens_BS)
    rope_2SP = model.rope_2SP[:, begin : begin + tokens_BS.shape[1]]
    for layer in model.blocks():
        x_BSD = layer(x_BSD, rope_2SP)
    return model.head(model.norm(x_BSD[:, -1:]), model.embed.weight, None)[:, 0].float()


def draw(scores_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token; of equal scores the one with the lowest id is the better."""
    if sampling.temperature == 0:
        return int(scores_V.argmax())
    sorted_V, order_V = scores_V.sort(descending=True, stable=True)
    # Less the best: nothing overflows, however low the temperature.
    probs_V = ((sorted_V - sorted_V[0]) / sampling.temperature).softmax(dim=-1)
    if sampling.top_k is not None:
        probs_V[sampling.top_k :] = 0
    if sampling.top_p is not None:
        probs_V /= probs_V.sum()
        before_V = probs_V.cumsum(dim=-1) - probs_V
        # The best token always stays: before it there is nothing.
        probs_V[before_V >= sampling.top_p] = 0
    return int(order_V[torch.multinomial(probs_V, 1, generator=generator)])


def pieces_of_text(ids: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of ids as they come, up to eos; a piece ends where a character does.

    Decoded together with the ids of the piece before, because some tokenizers drop a space where text begins.
    """
    before: list[int] = []
    fresh: list[int] = []
    for token in ids:
        if token == tokenizer.eos_id:
            break
        fresh.append(token)
        text = _after(before, fresh, tokenizer)
        if text and not text.endswith(UNFINISHED):
            yield text
            before, fresh = fresh, []
    if rest := _after(before, fresh, tokenizer):
        yield rest


def _after(before: list[int], fresh: list[int], tokenizer: Tokenizer) -> str:
    """What `fresh` adds to the text of `before`."""
    return tokenizer.decode(before + fresh)[len(tokenizer.decode(before)) :]
