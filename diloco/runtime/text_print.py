"""Compute the size and digest by which islands compare the text that they should all have."""

import numpy as np
from blake3 import blake3

from inner.data.corpus import Corpus
from inner.data.mixture import StreamedTokens
from inner.data.shards import Tokens
from outer.membership.base import TextPrint

WINDOW_TOKENS = 1024
MAX_WINDOWS = 4096
"""A text of more tokens than WINDOW_TOKENS x MAX_WINDOWS is hashed in MAX_WINDOWS evenly spaced
windows."""


def text_print(corpus: Corpus) -> TextPrint | None:
    """Return the size and digest of the texts that all islands have; None if a text is read in
    shards and here in part.

    The digest does not depend on the folder of a text or on the width of its token ids.
    """
    total = 0
    digest = blake3()
    for text in corpus.texts:
        if isinstance(text.train, StreamedTokens):
            return None
        if text.reader is not None:
            continue
        for tokens in (text.train, text.heldout):
            total += len(tokens)
            digest.update(f"{text.name} {len(tokens)}\n".encode())
            hash_tokens(digest, tokens)
    return TextPrint(tokens=total, digest=digest.hexdigest(length=16)) if total else None


def hash_tokens(digest: blake3, tokens: Tokens) -> None:
    """Add to a digest all tokens, or the tokens of MAX_WINDOWS windows."""
    num_windows = -(-len(tokens) // WINDOW_TOKENS)
    num_hashed = min(num_windows, MAX_WINDOWS)
    for number in range(num_hashed):
        # The first and the last window are included.
        begin = number * (num_windows - 1) // max(num_hashed - 1, 1) * WINDOW_TOKENS
        digest.update(np.asarray(tokens[begin : begin + WINDOW_TOKENS]).astype("<u4").tobytes())
