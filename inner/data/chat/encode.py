"""Encode conversations as coded token ids, packed so that none crosses the border between two
sequences.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from inner.data.chat.coding import DTYPE, IGNORE, as_context, count_learned
from inner.data.chat.messages import from_text
from inner.data.chat.templates import TEMPLATES


class Encoder(Protocol):
    """The methods of a tokenizer that conversations need (inner/data/tokenizer.py)."""

    @property
    def eos_id(self) -> int: ...

    @property
    def first_id(self) -> int | None: ...

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]: ...


def encode_conversation(tokenizer: Encoder, text: str, template: str) -> np.ndarray:
    """Return the coded ids of a conversation, int32, with eos as context at the end. `text` is a
    result of `to_text`.

    The templated text is encoded as a whole, as it is at inference. A token that begins before the
    assistant's words and ends within them is not learned, because at inference the model continues
    after the template's own tokens.
    """
    pieces = list(TEMPLATES[template](from_text(text)))
    ids_of_pieces = tokenizer.encode_pieces([(piece.text, piece.is_marker) for piece in pieces])
    coded = [
        ids.astype(DTYPE) if piece.is_learned else as_context(ids)
        for piece, ids in zip(pieces, ids_of_pieces, strict=True)
    ]
    begin = [] if tokenizer.first_id is None else [as_context(np.array([tokenizer.first_id]))]
    if begin and coded and coded[0].tolist() == begin[0].tolist():
        begin = []  # The template already begins with this id.
    return np.concatenate([*begin, *coded, as_context(np.array([tokenizer.eos_id]))])


class Fitted(NamedTuple):
    """The part of a conversation that is put into a sequence."""

    coded: np.ndarray
    """The ids that fit; empty if no learned token is among them."""
    is_cut: bool
    learned_share: float
    """Share of the conversation's learned tokens that fit, 0 to 1."""


def fit(coded: np.ndarray, seq_len: int) -> Fitted:
    """Cut a conversation to the length of one sequence. The result is empty if the cut leaves
    nothing to learn.
    """
    if len(coded) <= seq_len:
        return Fitted(coded, is_cut=False, learned_share=1.0)
    left = count_learned(coded[:seq_len])
    share = left / max(count_learned(coded), 1)
    return Fitted(coded[: seq_len if left else 0], is_cut=True, learned_share=share)


def place(coded: np.ndarray, position: int, seq_len: int) -> np.ndarray:
    """Return the conversation, of at most `seq_len` ids, behind the padding that makes it lie
    within one sequence.

    `position`: number of ids before the padding. Sequences begin at multiples of `seq_len`.
    """
    room = seq_len - position % seq_len
    return coded if len(coded) <= room else np.append(padding(room), coded)


def padding(length: int) -> np.ndarray:
    return np.full(length, IGNORE, DTYPE)


def end_of_sequence(position: int, seq_len: int) -> np.ndarray:
    """Return padding up to the end of the sequence, and one more id, which is the last target of
    the last sequence.
    """
    return padding(-position % seq_len + 1)
