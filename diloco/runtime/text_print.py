"""By what islands compare the text that they all should have."""

import numpy as np
from blake3 import blake3

from inner.data.corpus import Corpus
from inner.data.mixture import StreamedTokens
from inner.data.shards import Tokens
from outer.membership.base import TextPrint

WINDOW_TOKENS, MAX_WINDOWS = 1024, 4096
"""A text of more tokens than their product is hashed in so many windows of it, evenly spaced."""


def text_print(corpus: Corpus) -> TextPrint | None:
    """Size and digest of the texts that all islands have. None if one is read in shards, of which not all are here.

    Neither the folder of a text nor the width of its token ids enters it.
    """
    total, digest = 0, blake3()
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
    """Add all tokens, or those of MAX_WINDOWS windows, to a digest."""
    num_windows = -(-len(tokens) // WINDOW_TOKENS)
    num_hashed = min(num_windows, MAX_WINDOWS)
    for number in range(num_hashed):
        # The first and the last are among them.
        begin = number * (num_windows - 1) // max(num_hashed - 1, 1) * WINDOW_TOKENS
        digest.update(np.asarray(tokens[begin : begin + WINDOW_TOKENS]).astype("<u4").tobytes())
