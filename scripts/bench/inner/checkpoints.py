"""What saving and loading a checkpoint costs, beside torch.distributed.checkpoint and safetensors.

    python -m scripts.bench.inner.checkpoints [--megabytes N] [--tensors N] [--repeat N]

A model with AdamW states is saved and loaded in turn by ours, by torch.distributed.checkpoint with
its files synchronised to the disk, and by safetensors, likewise. Ours includes what the others do
not have: the hash of every byte while it is saved, the check of these hashes before it is loaded,
and publishing. A ratio above 1 means that ours is faster.
"""

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from inner.checkpoint.save_load import Checkpoints
from inner.checkpoint.state import live_tensors

Seconds = tuple[float, float]
"""Wall and CPU."""
Contestant = tuple[Callable[[], object], Callable[[], object]]
"""Its save, and its load."""


class State:
    """A model of equal matrices, and AdamW after one step."""

    def __init__(self, num_bytes: int, num_tensors: int) -> None:
        # Of each matrix three tensors are saved that have its size.
        columns = 512
        rows = max(num_bytes // num_tensors // 4 // columns, 1)
        self.inner_step = 1
        self.model_parts = [
            nn.Sequential(*(nn.Linear(columns, rows, bias=False) for _ in range(num_tensors // 3)))
        ]
        self.optimizers = [torch.optim.AdamW(self.model_parts[0].parameters(), foreach=False)]
        for param in self.model_parts[0].parameters():
            param.grad = torch.randn_like(param)
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All saved tensors by name, sharing memory."""
        return {
            name: copies[0]
            for name, copies in live_tensors(self.model_parts, self.optimizers).items()
        }


def main() -> None:
    """Print a line for saving and one for loading, for each contestant."""
    args = _arguments()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = State(args.megabytes * 10**6, args.tensors)
    megabytes = sum(tensor.nbytes for tensor in state.tensors.values()) / 1e6
    folder = Path(tempfile.mkdtemp(prefix="diloco-checkpoints-", dir=args.folder))
    try:
        print(f"{megabytes:.0f} MB in {len(state.tensors)} tensors, {args.repeat} repeats in turn")
        contestants = {
            "ours": ours(state, folder / "ours"),
            "torch.distributed.checkpoint": theirs(state, folder / "theirs"),
            "safetensors": plain(state, folder / "plain.safetensors"),
        }
        for number, what in enumerate(("save", "load")):
            compare(
                what,
                {name: pair[number] for name, pair in contestants.items()},
                megabytes,
                args.repeat,
            )
    finally:
        shutil.rmtree(folder)


def ours(state: State, folder: Path) -> Contestant:
    """Save and publish; find the newest that is not damaged, and load it."""
    checkpoints = Checkpoints(folder, keep=1)

    def load() -> None:
        found = checkpoints.newest()
        assert found is not None
        checkpoints.load(state, found)

    return lambda: checkpoints.save(state, {}, wait=True), load


def theirs(state: State, folder: Path) -> Contestant:
    """Save with torch's writer, and load with torch's reader, which unpickles."""

    def save() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        dcp.save(
            state.tensors,
            storage_writer=dcp.FileSystemWriter(folder, sync_files=True),
            no_dist=True,
        )

    return save, lambda: dcp.load(
        state.tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True
    )


def plain(state: State, file: Path) -> Contestant:
    """Save to one file of safetensors, and copy its values back."""

    def save() -> None:
        file.unlink(missing_ok=True)
        safetensors.torch.save_file(state.tensors, file)
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def load() -> None:
        saved = safetensors.torch.load_file(file)
        for name, tensor in state.tensors.items():
            tensor.copy_(saved[name])

    return save, load


def compare(
    what: str, sides: dict[str, Callable[[], object]], megabytes: float, repeat: int
) -> None:
    """Time all in turn, and print medians and the median ratio to ours."""
    times: dict[str, list[Seconds]] = {name: [] for name in sides}
    for _ in range(repeat + 1):
        for name, work in sides.items():
            times[name].append(_seconds(work))
    for name, all_of_it in times.items():
        rounds = list(zip(all_of_it, times["ours"], strict=True))[1:]
        wall, cpu = (median(theirs[kind] for theirs, _ in rounds) for kind in (0, 1))
        ratios = [median(theirs[kind] / ours[kind] for theirs, ours in rounds) for kind in (0, 1)]
        print(
            f"{what} {name:<30}{megabytes / wall:>7.0f} MB/s, {cpu:.3f} CPU s; "
            f"its time over ours {ratios[0]:.2f}, its CPU time {ratios[1]:.2f}",
            flush=True,
        )


def _seconds(work: Callable[[], object]) -> Seconds:
    wall = time.perf_counter()
    cpu = time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=307)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--folder", help="where the files are written (the folder for temporary files)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
