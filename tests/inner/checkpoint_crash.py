"""A tiny training state for checkpoint tests, and real SIGKILLs at named points of a save."""

import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inner.checkpoint.save_load import Checkpoints
from inner.checkpoint.tensor_reader import CheckpointFailed
from inner.errors import InputError

TIMEOUT_SECONDS = 30.0
WEIGHT_BYTES = 64 * 64 * 4
KILLED_AT_BYTES = 4096
FILES = ["index.json", "rank-0.tensors", "rank-1.tensors"]
"""The files that two ranks write, without the manifest."""


@dataclass
class Tiny:
    """A model of two matrices filled with the step number."""

    inner_step: int = 0
    model_parts: list[nn.Module] = field(
        default_factory=lambda: [nn.Sequential(matrix(), matrix())]
    )
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.set_step(self.inner_step)

    def set_step(self, step: int) -> None:
        self.inner_step = step
        for param in self.model_parts[0].parameters():
            nn.init.constant_(param, float(step))

    @property
    def values(self) -> set[float]:
        return {
            value
            for param in self.model_parts[0].parameters()
            for value in param.flatten().tolist()
        }


def matrix() -> nn.Module:
    return nn.Linear(64, 64, bias=False)


def open_checkpoints(folder: Path, keep: int = 1) -> Checkpoints:
    return Checkpoints(folder, keep, TIMEOUT_SECONDS)


def save_steps(checkpoints: Checkpoints, *steps: int) -> None:
    """Save a Tiny of each step in turn."""
    for step in steps:
        checkpoints.save(Tiny(step), {"step": step}, wait=True)


def step_and_values(checkpoints: Checkpoints) -> tuple[int | None, set[float]]:
    """Step of the newest checkpoint, and the values loaded from it."""
    found = checkpoints.newest()
    if found is None:
        return None, set()
    tiny = Tiny(99)
    assert checkpoints.load(tiny, found) == {"step": found.inner_step}
    return tiny.inner_step, tiny.values


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def with_checkpoints(rank: int, folder: Path, work: Callable[[int, Checkpoints, Path], Any]) -> Any:
    """Call `work` with this rank's Checkpoints and return its result."""
    return work(rank, open_checkpoints(folder, keep=2), folder)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises((InputError, CheckpointFailed)) as error:
        call()
    return f"{error.type.__name__}: {error.value}"


class Heard(logging.Handler):
    """Collects the warnings of this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("inner").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def kill_before(is_the_point: Callable[[str, tuple], bool]) -> None:
    """Make this process die by SIGKILL right before the first audit event for which `is_the_point`
    holds.
    """

    def look(event: str, args: tuple) -> None:
        # os.kill raises an audit event itself.
        if event != "os.kill" and is_the_point(event, args):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def kill_while_writing() -> None:
    """Make the kernel kill this process in the middle of writing a file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (KILLED_AT_BYTES, resource.RLIM_INFINITY))


def path_ends(args: tuple, suffix: str) -> bool:
    return str(args[0]).endswith(suffix)


def after_the_rename() -> Callable[[str, tuple], bool]:
    is_renamed = False

    def is_the_point(event: str, args: tuple) -> bool:
        nonlocal is_renamed
        was_renamed = is_renamed
        is_renamed |= event == "os.rename" and path_ends(args, ".partial")
        return was_renamed

    return is_the_point


def while_deleting() -> Callable[[str, tuple], bool]:
    num_deleted: int | None = None

    def is_the_point(event: str, args: tuple) -> bool:
        nonlocal num_deleted
        if event == "shutil.rmtree" and path_ends(args, ".deleted"):
            num_deleted = 0
        elif event == "os.remove" and num_deleted is not None:
            num_deleted += 1
        return num_deleted == 3

    return is_the_point


KILLS: dict[str, Callable[[], Any]] = {
    "before_the_copy": lambda: kill_before(
        lambda event, args: event == "os.mkdir" and path_ends(args, ".partial")
    ),
    "while_writing": kill_while_writing,
    "before_the_manifest": lambda: kill_before(
        lambda event, args: event == "open" and path_ends(args, "manifest.json") and args[1] == "w"
    ),
    "before_the_rename": lambda: kill_before(
        lambda event, args: event == "os.rename" and path_ends(args, ".partial")
    ),
    "after_the_rename": lambda: kill_before(after_the_rename()),
    "while_deleting": lambda: kill_before(while_deleting()),
}


def killed_on_a_rank(rank: int, folder: Path, point: str) -> None:
    """Save step 1, then die on rank 0 while saving step 2."""
    checkpoints = open_checkpoints(folder)
    save_steps(checkpoints, 1)
    if rank == 0:
        KILLS[point]()
    save_steps(checkpoints, 2)


def recovered_on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Load what a new process finds, save step 3, and report both."""
    checkpoints = open_checkpoints(folder)
    heard = Heard()
    found = step_and_values(checkpoints)
    save_steps(checkpoints, 3)
    return {
        "found": found,
        "warnings": heard.messages,
        "then": step_and_values(checkpoints),
        "names": names_in(folder),
    }
