"""Encode pieces of text, some of which are markers, as one text."""

from collections.abc import Sequence

import numpy as np
import tokenizers

BORDER = "\U0010ffff"
"""Character on both sides of a marker's stand-in. Unicode assigns no character to this code, so
texts do not contain it."""


class MarkedText:
    """Encodes for one tokenizer. Only a marker becomes its special token; the same characters in a
    text stay text.

    The library can only treat all special tokens in a text as tokens, or none. Each marker is
    therefore replaced by a stand-in, which a copy of the tokenizer knows as a token. It treats
    spaces around it as the marker does.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._known = {
            token.content: (number, token)
            for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._stand_ins: dict[str, str] = {}
        self._marker_ids: dict[int, int] = {}
        """Id of each marker, by the id of its stand-in."""

    def encode(self, pieces: Sequence[tuple[str, bool]]) -> list[np.ndarray]:
        """Return the ids of each piece, uint32. Together they are the ids of the whole text.
        `pieces`: text, whether it is a marker.

        A token belongs to the piece in which it begins. A marker without a token of its own is
        encoded as text.
        """
        texts = [
            self._stand_in(text) if is_marker else text.replace(BORDER, "\ufffd")
            for text, is_marker in pieces
        ]
        (encoding,) = self._tokenizer.encode_batch(["".join(texts)], add_special_tokens=False)
        ids = np.array([self._marker_ids.get(each, each) for each in encoding.ids], np.uint32)
        begins = np.maximum.accumulate(np.array([begin for begin, _ in encoding.offsets], np.int64))
        bounds = np.cumsum([len(text) for text in texts])[:-1]
        return np.split(ids, np.searchsorted(begins, bounds))

    def _stand_in(self, name: str) -> str:
        if name in self._known and name not in self._stand_ins:
            self._stand_ins[name] = self._add(*self._known[name])
        return self._stand_ins.get(name, name)

    def _add(self, marker_id: int, token: tokenizers.AddedToken) -> str:
        stand_in = f"{BORDER}{token.content}{BORDER}"
        ways = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
        # Make it special, so that the marker itself is plain text from now on. It may have been an
        # ordinary added token.
        self._tokenizer.add_special_tokens([token])
        self._tokenizer.add_tokens([tokenizers.AddedToken(stand_in, normalized=False, **ways)])
        number = self._tokenizer.token_to_id(stand_in)
        assert number is not None, "it has just been added"
        self._marker_ids[number] = marker_id
        return stand_in
