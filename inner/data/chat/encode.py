"""Conversations as coded token ids, packed so that none crosses the border between two sequences."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from inner.data.chat.coding import DTYPE, IGNORE, as_context, count_learned
from inner.data.chat.messages import from_text
from inner.data.chat.templates import TEMPLATES


class Encoder(Protocol):
    """What conversations need of a tokenizer (inner/data/tokenizer.py)."""

    @property
    def eos_id(self) -> int: ...

    @property
    def first_id(self) -> int | None: ...

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]: ...


def encode_conversation(tokenizer: Encoder, text: str, template: str) -> np.ndarray:
    """Coded ids of a conversation, int32, with eos as context at the end. `text` is what `to_text` has made.

    They are the ids of the templated text as a whole, as where the model is used. A token that begins before the
    assistant's words and ends in them is not learned: the model continues after the template's own tokens.
    """
    pieces = list(TEMPLATES[template](from_text(text)))
    ids_of_pieces = tokenizer.encode_pieces([(piece.text, piece.is_marker) for piece in pieces])
    coded = [
        ids.astype(DTYPE) if piece.is_learned else as_context(ids)
        for piece, ids in zip(pieces, ids_of_pieces, strict=True)
    ]
    begin = [] if tokenizer.first_id is None else [as_context(np.array([tokenizer.first_id]))]
    if begin and coded and coded[0].tolist() == begin[0].tolist():
        begin = []  # the template begins with it by itself
    return np.concatenate([*begin, *coded, as_context(np.array([tokenizer.eos_id]))])


class Fitted(NamedTuple):
    """What a sequence holds of a conversation."""

    coded: np.ndarray
    """Empty if nothing of it is learned, as the answers lie behind the end of a sequence."""
    is_cut: bool
    learned_share: float
    """Share of its learned tokens that is left, 0 to 1."""


def fit(coded: np.ndarray, seq_len: int) -> Fitted:
    """The beginning of a conversation that one sequence holds, if there is something to learn in it."""
    if len(coded) <= seq_len:
        return Fitted(coded, is_cut=False, learned_share=1.0)
    left = count_learned(coded[:seq_len])
    share = left / max(count_learned(coded), 1)
    return Fitted(coded[: seq_len if left else 0], is_cut=True, learned_share=share)


def place(coded: np.ndarray, position: int, seq_len: int) -> np.ndarray:
    """The conversation, of at most `seq_len` ids, with the padding before it so that it lies within one sequence.

    `position`: number of ids before it. Sequences begin at multiples of `seq_len`.
    """
    room = seq_len - position % seq_len
    return coded if len(coded) <= room else np.append(padding(room), coded)


def padding(length: int) -> np.ndarray:
    return np.full(length, IGNORE, DTYPE)


def end_of_sequence(position: int, seq_len: int) -> np.ndarray:
    """Padding up to the end of the sequence, and the one id that the last sequence has as its last target."""
    return padding(-position % seq_len + 1)
