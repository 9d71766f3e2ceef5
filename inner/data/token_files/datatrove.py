"""Token files of datatrove and nanotron: NAME.ds has the ids, NAME.ds.index the end of each
document, uint64.
"""

from pathlib import Path

import numpy as np

from inner.data.token_files.token_file import TokenFile, check_ends, map_ids, refuse

TYPES = {2: "uint16", 4: "uint32"}


def open_datatrove(path: Path) -> TokenFile:
    """Open NAME.ds with its NAME.ds.index. The number of bytes of an id follows from both files.
    Raises InputError.
    """
    index = path.with_name(f"{path.name}.index")
    if not index.is_file():
        refuse(path, f"there is no {index.name} beside it, which a .ds file of datatrove needs")
    ends = map_ids(index, np.dtype("uint64")).astype(np.int64)
    check_ends(index, ends, int(ends[-1]))
    width = path.stat().st_size // max(int(ends[-1]), 1)
    if width not in TYPES:
        refuse(
            path,
            f"it has {path.stat().st_size} bytes for {ends[-1]} ids, but an id has 2 or 4 bytes",
        )
    return TokenFile(path, map_ids(path, np.dtype(TYPES[width]), int(ends[-1])), ends)
