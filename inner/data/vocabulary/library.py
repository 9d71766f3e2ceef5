"""A tokenizer of the `tokenizers` library. Settings in its file other than the vocabulary do not
change the ids of a text.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from inner.data.vocabulary.ends import choose_eos, known_id
from inner.data.vocabulary.marked_text import MarkedText
from inner.errors import refused

FILE_CURE = "save one with tokenizers.Tokenizer.save, or use data.tokenizer=bytes"


class LibraryTokenizer:
    """A tokenizer of the `tokenizers` library that has an end-of-text token.

    `config`: the content of its tokenizer_config.json. `eos` and `bos` are token names given by the
    user.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        name: str,
        config: Mapping[str, object],
        eos: str | None = None,
        bos: str | None = None,
    ) -> None:
        # Encode special tokens as text. Otherwise the characters "</s>" inside a document would end
        # it.
        tokenizer.encode_special_tokens = True
        _switch_off_what_changes_ids(tokenizer)
        # The library's threads do not survive a fork and compete with the island's other ranks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer = tokenizer
        self._name = name
        self._marked: MarkedText | None = None
        self.eos, self.eos_source = choose_eos(ids, config, eos, name)
        self.eos_id = ids[self.eos]
        self.bos = bos
        self.first_id = None if bos is None else known_id(ids, bos, "data.bos", name)
        self.skips_bos = bos is None and config.get("add_bos_token") is True
        """Whether the tokenizer's own config asks for a bos, which is not put before documents
        here."""
        # Ids may have gaps, so the number of tokens can be lower than the highest id.
        self.vocab_size = max(ids.values()) + 1

    def encode(self, text: str) -> np.ndarray:
        """Return the library's ids. A lone surrogate becomes a question mark. Raises InputError if
        the library fails.
        """
        clean = _without_surrogates(text)
        # encode_batch_fast computes no offsets and takes a quarter less time than encode(); larger
        # batches are slower.
        with refused(
            f"data.tokenizer: {self._name!r} cannot encode a text of {len(clean)} characters",
            FILE_CURE,
        ):
            (encoding,) = self._tokenizer.encode_batch_fast([clean], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        with refused(f"data.tokenizer: {self._name!r} cannot decode {len(ids)} ids", FILE_CURE):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        clean = [(_without_surrogates(text), is_marker) for text, is_marker in pieces]
        length = sum(len(text) for text, _ in clean)
        with refused(
            f"data.tokenizer: {self._name!r} cannot encode a text of {length} characters", FILE_CURE
        ):
            self._marked = self._marked or MarkedText(self._tokenizer)
            return self._marked.encode(clean)

    def save(self, path: Path) -> None:
        self._tokenizer.save(str(path))


def _without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _switch_off_what_changes_ids(tokenizer: tokenizers.Tokenizer) -> None:
    """Switch off truncation, padding and BPE's dropout, which a tokenizer.json keeps from the
    program that saved it.

    Truncation would lose the rest of a text, padding would be learned as text, and dropout would
    give each island different ids.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None
