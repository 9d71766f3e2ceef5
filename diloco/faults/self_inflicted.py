"""Faults that an island inflicts on itself. torch is imported only if there are any.

An island kills or freezes itself at a phase of a round, poisons or corrupts what it sends in a
round, or is slow from the start: the faults in island.faults of its config. The launcher
(simulate/injector.py) inflicts all other faults on processes. A fault that only the running island
can inflict is requested by the launcher with a file in ISLAND_DIR/faults.
"""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.faults.spec import Fault, invalid, parse_fault

if TYPE_CHECKING:
    import torch

    from outer.hooks import Hooks, Phase

POISON = -10.0
FAULTS_FOLDER = "faults"
"""A folder in the island's folder. The launcher requests a fault by creating SPEC.begun in it.

The island creates SPEC.done before it acts.
"""


def claim(folder: Path, fault: Fault) -> bool:
    """Claim the fault, and return whether this caller is the first to do so.

    That is so for exactly one caller among all ranks and all restarts of the island in `folder`.
    """
    path = done_path(folder, fault)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def done_path(folder: Path, fault: Fault) -> Path:
    """Return the path of the file that marks the fault as claimed."""
    return folder / FAULTS_FOLDER / f"{fault}.done"


def request_fault(folder: Path, fault: Fault) -> None:
    """Request the fault from the running island in `folder`."""
    (folder / FAULTS_FOLDER / f"{fault}.begun").touch()


def build_hooks(specs: Iterable[str], index: int, rank: int, folder: Path) -> "Hooks":
    """Build the hooks that inflict the faults `specs` on island `index`. Raises ConfigError for an
    invalid spec.

    `folder` is the island's folder. If it contains FAULTS_FOLDER, the launcher may request more
    faults later.
    """
    from outer.hooks import NO_HOOKS

    faults = [fault for fault in map(parse_fault, specs) if index in fault.targets]
    for fault in faults:
        if not fault.is_self_inflicted:
            raise invalid(
                str(fault),
                "an island cannot do this to itself: give it to `diloco simulate`",
                fault.kind,
            )
    return (
        SelfInflicted(faults, rank, folder)
        if faults or (folder / FAULTS_FOLDER).is_dir()
        else NO_HOOKS
    )


def slow_down(hooks: "Hooks", step_seconds: float) -> None:
    """Sleep so that the inner step takes as long as the current slowdown demands.

    Every rank calls it after each step.
    """
    if isinstance(hooks, SelfInflicted):
        time.sleep(step_seconds * (hooks.slowness() - 1))


class SelfInflicted:
    """Hooks that inflict the faults of one rank."""

    def __init__(self, faults: list[Fault], rank: int, folder: Path) -> None:
        self._faults = faults
        self._rank = rank
        self._folder = folder

    def reached(self, phase: "Phase", round_number: int) -> None:
        """Kill or stop this process if a fault is due: in its round, or in the first later round
        with this phase.
        """
        for fault in [*self._faults, *self._requested()]:
            is_here = (
                fault.phase == phase and fault.round is not None and round_number >= fault.round
            )
            # The claim outlives the process, so a restarted island does not repeat the fault.
            if is_here and self._rank == 0 and claim(self._folder, fault):
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def pseudo_grad(self, round_number: int, values: "torch.Tensor") -> "torch.Tensor":
        """Return the values, multiplied by POISON in poisoned rounds."""
        for fault in self._faults:
            if fault.kind == "poison" and fault.round is not None:
                num_rounds = round_number - fault.round
                if num_rounds >= 0 and (fault.rounds is None or num_rounds < fault.rounds):
                    claim(self._folder, fault)
                    values = values * POISON
        return values

    def payload(self, round_number: int, payload: "torch.Tensor") -> "torch.Tensor":
        """Return the payload, damaged if a fault is due.

        The first rank that sends in the fault's round gets one bit flipped, or all bits set (NaN).
        """
        for fault in [*self._faults, *self._requested()]:
            is_kind = fault.kind in ("corrupt", "nan")
            if not is_kind or round_number < (fault.round or 0) or not payload.numel():
                continue
            if claim(self._folder, fault):
                payload = payload.clone()
                if fault.kind == "nan":
                    payload.fill_(0xFF)
                else:
                    payload[payload.numel() // 2] ^= 1 << 6
        return payload

    def slowness(self) -> float:
        """Return the factor by which inner steps are slowed down now."""
        factor = 1.0
        for fault in self._faults + self._requested():
            if fault.kind == "slow":
                factor *= fault.factor or 1.0
        return factor

    def _requested(self) -> list[Fault]:
        """Return the faults that the launcher has requested, without slowdowns whose time is
        over.
        """
        requested = []
        for path in (self._folder / FAULTS_FOLDER).glob("*.begun"):
            fault = parse_fault(path.name.removesuffix(".begun"))
            if fault.kind != "slow" or time.time() - path.stat().st_mtime < (fault.seconds or 0):
                requested.append(fault)
        return requested
