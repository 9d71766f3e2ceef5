"""Documents to token ids, in their order, in this process or in several."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from inner.data.documents import Document
from inner.data.tokenizer import Tokenizer, build_tokenizer
from inner.errors import InputError

CHUNK_CHARACTERS = 1 << 18
"""Text that a process gets at a time: small enough to fit its cache, large enough that sending it costs nothing."""
CHUNKS_AHEAD = 3
"""For each process, so that none waits for the others' results to be written."""


@dataclass(frozen=True)
class Encoded:
    """A document and its ids, eos included; no ids where nobody wants them."""

    document: Document
    ids: np.ndarray


Wanted = Callable[[Document], bool]
Stream = Generator[Encoded, None, None]


def token_dtype(tokenizer: Tokenizer) -> str:
    """The smallest of uint16 and uint32 that holds every id."""
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def encoded(documents: Iterable[Document], tokenizer: str, processes: int, is_wanted: Wanted) -> Stream:
    """All documents in their order, whatever the number of processes. Close it when it is not read to its end.

    is_wanted may be asked some documents before those are taken. InputError: a process died.
    """
    if processes > 1:
        yield from _encoded_by_others(documents, tokenizer, processes, is_wanted)
        return
    own = build_tokenizer(tokenizer)
    for document in documents:
        (ids,) = _encode(own, [document.text if is_wanted(document) else None])
        yield Encoded(document, ids)


def _encoded_by_others(documents: Iterable[Document], tokenizer: str, processes: int, is_wanted: Wanted) -> Stream:
    # A fork would copy what threads of this process hold.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, initializer=_begin, initargs=(tokenizer,))
    ahead: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()
    try:
        for chunk in _chunks(documents):
            texts = [document.text if is_wanted(document) else None for document in chunk]
            ahead.append((chunk, pool.submit(_encode_here, texts)))
            if len(ahead) > CHUNKS_AHEAD * processes:
                yield from _finished(*ahead.popleft())
        while ahead:
            yield from _finished(*ahead.popleft())
    except BrokenProcessPool:
        raise InputError(
            f"a process that tokenises died, perhaps for lack of memory; finished shards stay: run it again, with "
            f"fewer than {processes} --processes"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _finished(chunk: list[Document], future: "Future[list[np.ndarray]]") -> Iterator[Encoded]:
    for document, ids in zip(chunk, future.result(), strict=True):
        yield Encoded(document, ids)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in their order, some at a time."""
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document.text)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _encode(tokenizer: Tokenizer, texts: list[str | None]) -> list[np.ndarray]:
    """The ids of each text and eos; of None nothing."""
    dtype = token_dtype(tokenizer)
    eos = np.array([tokenizer.eos_id], dtype=dtype)
    nothing = eos[:0]
    encode = tokenizer.encode
    return [nothing if text is None else np.append(encode(text).astype(dtype), eos) for text in texts]


_own: list[Tokenizer] = []
"""The tokenizer of a process that `_encoded_by_others` has started: a pool gives its processes no other place."""


def _begin(tokenizer: str) -> None:
    _own.append(build_tokenizer(tokenizer))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot tell the pool's processes to end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_here(texts: list[str | None]) -> list[np.ndarray]:
    return _encode(_own[0], texts)
