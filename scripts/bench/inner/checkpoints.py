"""What it costs to read a checkpoint without unpickling, and to sign it, beside torch's reader.

    python -m scripts.bench.inner.checkpoints [--elements N] [--tensors N] [--repeat N]

Saves tensors with torch.distributed.checkpoint. Torch's FileSystemReader, which unpickles the
index, and our reader load them in turn. Times are processor times; a ratio above 1 means that ours
takes longer.
"""

import argparse
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp

from diloco.checkpoints.signing import RunKeySigner
from inner.checkpoint import folder as disk
from inner.checkpoint.folder import SavedCheckpoint, list_published
from inner.checkpoint.index import read_index
from inner.checkpoint.manifest import Manifest, Signer, Unsigned
from inner.checkpoint.tensor_reader import read_tensors
from outer.network.run_key import RunKey

Tensors = dict[str, torch.Tensor]


def main() -> None:
    """Print a line for the index, for the whole checkpoint, and for saving."""
    args = _arguments()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    tensors = {f"params/{n}": torch.randn(args.elements // args.tensors) for n in range(args.tensors)}
    folder = Path(tempfile.mkdtemp(prefix="diloco-checkpoints-"))
    try:
        save(tensors, folder, Unsigned())
        (checkpoint,), _ = list_published(folder)
        index_bytes = checkpoint.manifest.files[".metadata"].size_bytes
        print(
            f"{args.elements} elements in {args.tensors} tensors, index of {index_bytes} bytes; {args.repeat} repeats"
        )
        compare("read the index", lambda: _read_theirs(checkpoint), lambda: read_index(checkpoint), args.repeat)
        rooms = {name: torch.zeros_like(values) for name, values in tensors.items()}
        compare("load all", lambda: load_theirs(rooms, checkpoint), lambda: load_ours(rooms, checkpoint), args.repeat)
        assert all(torch.equal(rooms[name], values) for name, values in tensors.items())
        signer = RunKeySigner(RunKey(b"a key of the benchmark"))
        plain, signed = (lambda signer=s: save(tensors, folder, signer) for s in (Unsigned(), signer))
        compare("save, signed or not", plain, signed, args.repeat)
    finally:
        shutil.rmtree(folder)


def compare(what: str, theirs: Callable[[], object], ours: Callable[[], object], repeat: int) -> None:
    """Time both in turn and print medians and the median ratio."""
    seconds: list[tuple[float, float]] = []
    for _ in range(repeat):
        seconds.append((_seconds(theirs), _seconds(ours)))
    before, after = (median(side) for side in zip(*seconds, strict=True))
    ratio = median(second / first for first, second in seconds)
    print(f"{what:<22}{before * 1e3:>10.1f} ms {after * 1e3:>10.1f} ms   ratio {ratio:.3f}")


def save(tensors: Tensors, folder: Path, signer: Signer) -> None:
    """Save and publish a checkpoint, and delete the others."""
    partial = disk.create_partial(folder, 1, 0, 0)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial, sync_files=True, overwrite=False), no_dist=True)
    files = disk.file_specs(partial, [".metadata", "*.distcp"])
    disk.publish(partial, Manifest(1, {}, {}, files), signer)
    for path in folder.glob("step-*"):
        if path.name != partial.name.removesuffix(disk.PARTIAL):
            shutil.rmtree(path)


def load_theirs(rooms: Tensors, checkpoint: SavedCheckpoint) -> None:
    """Load with torch's reader."""
    dcp.load(rooms, storage_reader=dcp.FileSystemReader(checkpoint.path), no_dist=True)


def load_ours(rooms: Tensors, checkpoint: SavedCheckpoint) -> None:
    """Load with the reader that unpickles nothing."""
    read_tensors(rooms, checkpoint.path, read_index(checkpoint), None)


def _read_theirs(checkpoint: SavedCheckpoint) -> object:
    return dcp.FileSystemReader(checkpoint.path).read_metadata()


def _seconds(work: Callable[[], object]) -> float:
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
