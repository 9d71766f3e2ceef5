"""Tokenise documents in their order, in this process or in a pool of processes."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from inner.data.chat.coding import DTYPE
from inner.data.chat.encode import encode_conversation
from inner.data.sources.documents import Document
from inner.data.tokenizer import Tokenizer, build_tokenizer
from inner.errors import InputError

CHUNK_CHARACTERS = 1 << 18
"""Number of characters that are sent to a worker at a time: small enough for its cache, and large
enough that the cost of sending does not matter."""
CHUNKS_AHEAD = 3
"""Number of chunks in flight per worker, so that no worker waits while other results are
written."""


@dataclass(frozen=True)
class EncodedDocument:
    """A document and its token ids, eos included; the ids are empty if the document was not
    wanted.
    """

    document: Document
    ids: np.ndarray


TokenizerChoice = tuple[str, str | None, str | None]
DocumentFilter = Callable[[Document], bool]
EncodedDocuments = Generator[EncodedDocument, None, None]


def token_dtype(tokenizer: Tokenizer) -> str:
    """Return the smaller of uint16 and uint32 that holds every id."""
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def tokenise_documents(
    documents: Iterable[Document],
    tokenizer: TokenizerChoice,
    processes: int,
    is_wanted: DocumentFilter,
    template: str | None = None,
) -> EncodedDocuments:
    """Yield all documents in order, for any number of processes. Close the generator if it is not
    exhausted.

    `tokenizer`: the arguments of `build_tokenizer`. With `template` the documents are
    conversations, and their ids are coded (inner/data/chat/coding.py). is_wanted may be called for
    documents that come later than the one yielded. Raises InputError if a worker process died.
    """
    if processes > 1:
        yield from _tokenise_in_pool(documents, tokenizer, processes, is_wanted, template)
        return
    encoder = build_tokenizer(*tokenizer)
    for document in documents:
        (ids,) = _encode(encoder, [document.text if is_wanted(document) else None], template)
        yield EncodedDocument(document, ids)


def _tokenise_in_pool(
    documents: Iterable[Document],
    tokenizer: TokenizerChoice,
    processes: int,
    is_wanted: DocumentFilter,
    template: str | None,
) -> EncodedDocuments:
    # A fork would copy locks that other threads of this process hold.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        processes, spawn, initializer=_initialise_worker, initargs=(tokenizer,)
    )
    ahead: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    try:
        for chunk in _chunks(documents):
            texts = [document.text if is_wanted(document) else None for document in chunk]
            ahead.append((chunk, pool.submit(_encode_in_worker, texts, template)))
            if len(ahead) > CHUNKS_AHEAD * processes:
                yield from _pair_with_ids(*ahead.popleft())
        while ahead:
            yield from _pair_with_ids(*ahead.popleft())
    except BrokenProcessPool:
        raise InputError(
            "a tokeniser process died, perhaps for lack of memory; run it again with --processes "
            f"below {processes}: finished shards stay"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _pair_with_ids(
    chunk: list[Document], future: "Future[list[np.ndarray]]"
) -> Iterator[EncodedDocument]:
    for document, ids in zip(chunk, future.result(), strict=True):
        yield EncodedDocument(document, ids)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk = []
            size = 0
    if chunk:
        yield chunk


def _encode(
    tokenizer: Tokenizer, texts: list[str | None], template: str | None
) -> list[np.ndarray]:
    """Return the token ids of each text, with bos (if there is one) before and eos after it; an
    empty array for None.
    """
    if template is not None:
        nothing = np.empty(0, DTYPE)
        return [
            nothing if text is None else encode_conversation(tokenizer, text, template)
            for text in texts
        ]
    dtype = token_dtype(tokenizer)
    return [
        np.empty(0, dtype) if text is None else encode_document(tokenizer, text, dtype)
        for text in texts
    ]


def encode_document(tokenizer: Tokenizer, text: str, dtype: str = "uint32") -> np.ndarray:
    """Return the token ids of a document for training: bos if there is one, the text, eos. `dtype`
    must hold every id.
    """
    ids = tokenizer.encode(text)
    first = [] if tokenizer.first_id is None else [tokenizer.first_id]
    document = np.empty(len(first) + len(ids) + 1, dtype)
    document[: len(first)] = first
    document[len(first) : -1] = ids
    document[-1] = tokenizer.eos_id
    return document


_worker_tokenizers: list[Tokenizer] = []
"""The tokenizer of a worker process of `_tokenise_in_pool`. It is global because a pool offers no
other place for state."""


def _initialise_worker(tokenizer: TokenizerChoice) -> None:
    _worker_tokenizers.append(build_tokenizer(*tokenizer))
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent ends, because a killed parent cannot shut down its pool."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(texts: list[str | None], template: str | None) -> list[np.ndarray]:
    return _encode(_worker_tokenizers[0], texts, template)
