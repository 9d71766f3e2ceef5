"""Plain arrays of token ids in .npy files: with numpy's header, or without one as OLMo's tools write them."""

from pathlib import Path

import numpy as np

from inner.data.token_files.token_file import TokenFile, map_ids, refuse

NUMPY_MAGIC = b"\x93NUMPY"


def open_array(path: Path, dtype: str) -> TokenFile:
    """Open a .npy file; ids without a header are of `dtype`. Documents end where eos is, and only there."""
    with path.open("rb") as file:
        has_header = file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC
    tokens = _open_saved(path) if has_header else map_ids(path, np.dtype(dtype))
    return TokenFile(path, tokens, np.array([len(tokens)], np.int64), knows_documents=False)


def _open_saved(path: Path) -> np.ndarray:
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError) as error:
        refuse(path, f"numpy cannot map it ({error})")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        refuse(path, f"it holds {tokens.dtype} of shape {tokens.shape}, and ids are a row of integers")
    return tokens
