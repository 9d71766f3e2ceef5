"""Make shards of a text in order. Starting at the beginning of the text or of any shard gives the
same result.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from inner.config import DataConfig
from inner.data.chat.coding import DTYPE
from inner.data.chat.encode import Fitted, end_of_sequence, fit, place
from inner.data.chat.messages import learned_text
from inner.data.prepare import chat_template, describe_losses
from inner.data.shards import ShardCounts
from inner.data.sources.build import build_source
from inner.data.sources.documents import Document, Place, hold_out_an_end, is_heldout, read_from
from inner.data.streaming.index import Begin, Heldout, Made, Shard, ShardIndex, sha256_of
from inner.data.tokenise import EncodedDocument, token_dtype, tokenise_documents
from inner.data.tokenizer import build_tokenizer
from inner.errors import InputError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MadeShard:
    """A shard and its entries in the index."""

    number: int
    made: Made
    ids: np.ndarray
    heldout_ids: np.ndarray | None
    """The ids of the held-out text, given together with the first shard; None for other shards."""


def new_index(config: DataConfig, identity: str) -> ShardIndex:
    """Return the index of a text of which nothing has been tokenised yet."""
    tokenizer = build_tokenizer(*config.tokenizer_choice)
    values = {
        "identity": identity,
        "dtype": DTYPE if config.format == "chat" else token_dtype(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "shard_tokens": config.shard_tokens,
    }
    return ShardIndex.model_validate(values)


def make_shards(
    config: DataConfig,
    index: ShardIndex,
    number: int,
    processes: int,
    report: Callable[[float | None], None],
) -> Iterator[MadeShard]:
    """Make shard `number` and all later ones, to the end of the text. `number` is in the index, or
    the first that is not.

    `report` is called after each document with the share of the text that has been read, or None if
    that is unknown. Raises InputError if the text is broken, or if nothing of it is left to train
    on or to hold out.
    """
    cutter = _Cutter(config, index, number)
    documents = _documents(config, index, cutter.begin)
    # The pool reads documents ahead. Their places wait here until the documents come out of it.
    places: deque[Place | None] = deque()

    def remember(stream: Iterable[Document]) -> Generator[Document, None, None]:
        for document in stream:
            places.append(document.place)
            yield document

    template = chat_template(config)
    tokenizer = config.tokenizer_choice
    with (
        closing(remember(documents)) as remembered,
        closing(
            tokenise_documents(remembered, tokenizer, processes, cutter.is_wanted, template)
        ) as stream,
    ):
        for document_number, encoded in enumerate(stream, start=cutter.begin.document):
            cutter.add(encoded, document_number, places.popleft())
            report(encoded.document.share)
            yield from cutter.take_full()
            if cutter.is_full:
                break
    if losses := describe_losses(cutter.counts, config.seq_len):
        log.warning("%s", losses)
    yield from cutter.take_rest()


def _documents(config: DataConfig, index: ShardIndex, begin: Begin) -> Iterator[Document]:
    documents = read_from(build_source(config), begin.document, begin.place)
    is_open = index.heldout is None or index.heldout.is_end
    return (
        hold_out_an_end(documents, config.heldout_fraction)
        if is_open and config.format == "text"
        else documents
    )


@dataclass(frozen=True)
class _Piece:
    """The ids of a document that are not yet in a shard, and where in the text they begin."""

    ids: np.ndarray
    begin: Begin


class _Cutter:
    """Collects the ids of documents and cuts them into shards."""

    def __init__(self, config: DataConfig, index: ShardIndex, number: int) -> None:
        self._config = config
        self._index = index
        self._number = number
        is_known = number < len(index.shards)
        self.begin = index.shards[number].begin if is_known else index.following
        assert is_known or number == len(index.shards), f"shard {number} of {len(index.shards)}"
        self._skip = self.begin.token
        self._position = number * index.shard_tokens - self.begin.token
        """Number of training tokens before the next document."""
        self._limit = math.inf if config.max_tokens is None else config.max_tokens
        self._pieces: deque[_Piece] = deque()
        self._num_ids = 0
        self._heldout = index.heldout
        self._heldout_ids: list[np.ndarray] = []
        self._num_heldout = self._heldout_bytes = 0
        self._is_end = False
        self.counts = ShardCounts()
        """For conversations: how many were trained on or held out, left out, and cut."""

    @property
    def is_full(self) -> bool:
        return self._position >= self._limit and self._heldout is not None

    def is_wanted(self, document: Document) -> bool:
        return self._heldout is None or not self._is_heldout(document)

    def add(self, encoded: EncodedDocument, number: int, place: Place | None) -> None:
        """Add a document after the others."""
        fitted = (
            self._fit(encoded.ids)
            if self._config.format == "chat"
            else Fitted(encoded.ids, False, 1.0)
        )
        if self._is_heldout(encoded.document):
            if self._heldout is None and len(fitted.coded):
                self._hold_out(encoded, fitted)
        else:
            self._train_on(fitted.coded, number, place)
        enough = self._num_ids > self._index.shard_tokens or self._position >= self._limit
        if self._heldout is None and enough and self._num_heldout > self._config.seq_len:
            self._close_heldout()

    def take_full(self) -> Iterator[MadeShard]:
        """Yield the shards that are full."""
        while self._heldout is not None and self._num_ids > self._index.shard_tokens:
            yield self._take(self._index.shard_tokens)

    def take_rest(self) -> Iterator[MadeShard]:
        """Yield the rest at the end of the text as a last shard. Raises InputError if there are no
        shards at all.
        """
        if self._config.format == "chat":
            self._append(end_of_sequence(self._position, self._config.seq_len))
            if self._heldout is None:
                self._heldout_ids.append(end_of_sequence(self._num_heldout, self._config.seq_len))
        if self._heldout is None:
            self._close_heldout()
        yield from self.take_full()
        # A single id is already the last id of the shard before.
        if self._num_ids > 1:
            yield self._take(self._num_ids - 1)

    def _fit(self, ids: np.ndarray) -> Fitted:
        fitted = fit(ids, self._config.seq_len)
        if len(ids):
            is_left = len(fitted.coded) > 0
            self.counts += ShardCounts(
                train_documents=is_left, unlearned=not is_left, cut=is_left and fitted.is_cut
            )
        return fitted

    def _train_on(self, ids: np.ndarray, number: int, where: Place | None) -> None:
        if self._config.format == "chat" and len(ids):
            ids = place(ids, self._position, self._config.seq_len)
        ids = ids[: int(min(self._limit - self._position, len(ids)))]
        self._position += len(ids)
        if self._skip:
            ids = ids[self._skip :]
        if len(ids):
            begin = Begin(document=number, token=self._skip, place=where)
            self._pieces.append(_Piece(ids, begin))
            self._num_ids += len(ids)
        self._skip = 0

    def _append(self, ids: np.ndarray) -> None:
        if self._pieces:
            last = self._pieces.pop()
            self._pieces.append(_Piece(np.append(last.ids, ids), last.begin))
            self._num_ids += len(ids)

    def _hold_out(self, encoded: EncodedDocument, fitted: Fitted) -> None:
        text = encoded.document.text
        ids = fitted.coded
        if self._config.format == "chat":
            text = learned_text(text)
            ids = place(ids, self._num_heldout, self._config.seq_len)
        self._heldout_ids.append(ids)
        self._num_heldout += len(ids)
        self._heldout_bytes += round(len(text.encode("utf-8", "replace")) * fitted.learned_share)
        self._is_end |= encoded.document.is_end

    def _is_heldout(self, document: Document) -> bool:
        return document.is_end or is_heldout(document.key, self._config.heldout_fraction)

    def _close_heldout(self) -> None:
        if not self._heldout_bytes or not self._num_ids:
            raise InputError(
                f"data.source={self._config.source}: {self._num_ids} tokens to train on and "
                f"{self._num_heldout} held out with "
                f"data.heldout_fraction={self._config.heldout_fraction}; both are needed: give "
                f"more text, or {'raise' if self._num_ids else 'lower'} data.heldout_fraction"
            )
        ids = np.concatenate(self._heldout_ids)
        sha256 = sha256_of(ids.data)
        self._heldout = Heldout(
            tokens=len(ids), text_bytes=self._heldout_bytes, sha256=sha256, is_end=self._is_end
        )

    def _take(self, size: int) -> MadeShard:
        """Cut off the first `size` ids as a shard, with a copy of the id after them."""
        assert self._heldout is not None, "the held-out text must be made before the first shard"
        begin = self._pieces[0].begin
        left = size
        parts = []
        while left >= len(self._pieces[0].ids):
            piece = self._pieces.popleft()
            parts.append(piece.ids)
            left -= len(piece.ids)
        first = self._pieces.popleft()
        parts.append(first.ids[: left + 1])
        following = first.begin.model_copy(update={"token": first.begin.token + left})
        self._pieces.appendleft(_Piece(first.ids[left:], following))
        self._num_ids -= size
        ids = np.concatenate(parts)
        record = Shard(tokens=len(ids), sha256=sha256_of(ids.data), begin=begin)
        heldout_ids = (
            np.concatenate(self._heldout_ids) if self._number == 0 and self._heldout_ids else None
        )
        self._number += 1
        made = Made(record=record, following=following, heldout=self._heldout)
        return MadeShard(self._number - 1, made, ids, heldout_ids)
