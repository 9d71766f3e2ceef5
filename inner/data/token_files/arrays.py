"""Plain arrays of token ids in .npy files: with numpy's header, or without one as OLMo's tools
write them.
"""

import logging
from pathlib import Path

import numpy as np

from inner.data.token_files.token_file import TokenFile, map_ids, refuse
from inner.errors import refused

log = logging.getLogger(__name__)

TYPES = {2: "uint16", 4: "uint32", 8: "int64"}
SAMPLE_BYTES = 1 << 20
FEWEST_IDS = 64
"""Smallest number of ids from which zeros in every second place are taken as evidence and not as
chance."""
MOST_TOO_HIGH = 0.9
"""Share of too high ids above which the ids must have two bytes. If two-byte ids are read as four
bytes, nearly all are too high; the ids of another tokenizer are mostly low."""
NUMPY_MAGIC = b"\x93NUMPY"


def open_array(path: Path, vocab_size: int) -> TokenFile:
    """Open a .npy file. Documents end only at eos.

    Ids without a header have two bytes, or four if `vocab_size` is above 65,536, unless the file
    shows another width.
    """
    with path.open("rb") as file:
        has_header = file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC
    tokens = (
        _open_saved(path)
        if has_header
        else map_ids(path, np.dtype(TYPES[find_width(path, vocab_size)]))
    )
    return TokenFile(path, tokens, np.array([len(tokens)], np.int64), knows_documents=False)


def find_width(path: Path, vocab_size: int) -> int:
    """Return the number of bytes of an id in a file without a header. It follows from the
    vocabulary, unless the beginning of the file shows another width.
    """
    expected = 2 if vocab_size <= 1 << 16 else 4
    sample = np.fromfile(path, np.uint8, SAMPLE_BYTES)
    sample = sample[: len(sample) // 8 * 8]
    width = expected
    while width < 8 and _is_half_empty(sample.view(f"<u{width}")):
        width *= 2
    ids = sample.view(f"<u{width}")
    if width == 4 and len(ids) >= FEWEST_IDS and (ids >= vocab_size).mean() > MOST_TOO_HIGH:
        width = 2
    if width != expected:
        log.warning(
            "%s: its content shows that its ids have %d bytes, and not %d as the tokenizer with "
            "%d ids suggests; a file of numpy.save records its type",
            path, width, expected, vocab_size,
        )  # fmt: skip
    return width


def _is_half_empty(ids: np.ndarray) -> bool:
    """Return whether every second id is 0. Ids that are halves of wider ids look like this."""
    return len(ids) >= FEWEST_IDS and not ids[1::2].any() and bool(ids[::2].any())


def _open_saved(path: Path) -> np.ndarray:
    with refused(
        f"data.paths: {path}: numpy cannot map it", "write the file again, or name others"
    ):
        tokens = np.lib.format.open_memmap(path, mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        refuse(
            path,
            f"it holds {tokens.dtype} of shape {tokens.shape}, but ids must be a 1-D array of "
            "integers",
        )
    return tokens
