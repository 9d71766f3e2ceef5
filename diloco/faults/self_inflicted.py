"""Faults that an island inflicts on itself, and the record of a run's faults. No torch until there are some.

An island kills or freezes itself at a phase of a round, poisons, corrupts or sends NaN at a round, is slow from the
start: from island.faults in its config. The launcher (inflict.py) does the rest to processes, and has an island begin
what only the island can do by a file in ISLAND_DIR/faults.
"""

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.fault_spec import Fault, parse_fault, wrong

if TYPE_CHECKING:
    import torch

    from outer.phases import Hooks, Phase

POISON = -10.0
FOLDER = "faults"
"""In an island's folder: SPEC.begun, made by the launcher, and SPEC.done, made by the island before it does it."""
LOG = "faults.jsonl"
"""In a run's folder: a FaultRecord a line."""


@dataclass(frozen=True, kw_only=True)
class FaultRecord:
    """A fault that has been done, and to which islands; or the end of one, `is_end`."""

    spec: str
    kind: str
    islands: tuple[str, ...]
    text: str
    is_end: bool = False
    time: float = field(default_factory=time.time)


def record_fault(run_dir: Path, record: FaultRecord) -> None:
    """Append to the run's faults."""
    with (run_dir / LOG).open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_faults(run_dir: Path) -> list[FaultRecord]:
    """What has been done to the run so far, in order; a line that was cut short is left out."""
    try:
        lines = (run_dir / LOG).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    return [FaultRecord(**value | {"islands": tuple(value["islands"])}) for value in values]


def claim(folder: Path, fault: Fault) -> bool:
    """Whether the caller is the first to do the fault: one of all ranks, in all lives of the island in `folder`."""
    path = done_path(folder, fault)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def done_path(folder: Path, fault: Fault) -> Path:
    """The file that says that the fault has been done."""
    return folder / FOLDER / f"{fault}.done"


def begin(folder: Path, fault: Fault) -> None:
    """Tell the running island in `folder` that the fault's moment has come."""
    (folder / FOLDER / f"{fault}.begun").touch()


def build_hooks(specs: Iterable[str], index: int, rank: int, folder: Path) -> "Hooks":
    """What the island `index`, whose folder this is, inflicts on itself. Raises ConfigError for a mistyped spec.

    `specs` is island.faults. Where the folder holds one called `faults`, the launcher may begin others later.
    """
    from outer.phases import NO_HOOKS

    faults = [fault for fault in map(parse_fault, specs) if index in fault.who]
    for fault in faults:
        if not fault.is_own:
            raise wrong(str(fault), "an island cannot do this to itself: give it to `diloco simulate`", fault.kind)
    return SelfInflicted(faults, rank, folder) if faults or (folder / FOLDER).is_dir() else NO_HOOKS


def slow_down(hooks: "Hooks", step_seconds: float) -> None:
    """Sleep as long as a fault asks for after an inner step that took so long. Every rank calls it after each."""
    if isinstance(hooks, SelfInflicted):
        time.sleep(step_seconds * (hooks.slowness() - 1))


class SelfInflicted:
    """The faults of one rank."""

    def __init__(self, faults: list[Fault], rank: int, folder: Path) -> None:
        self._faults, self._rank, self._folder = faults, rank, folder

    def reached(self, phase: "Phase", round_number: int) -> None:
        """End or stop this process if a fault says so: at its round, or the first later one that comes so far."""
        for fault in self._faults:
            is_here = fault.phase == phase and fault.round is not None and round_number >= fault.round
            # Once: an island that comes back to the same folder has this behind it.
            if is_here and self._rank == 0 and claim(self._folder, fault):
                os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def pseudo_grad(self, round_number: int, values: "torch.Tensor") -> "torch.Tensor":
        """Times POISON in the rounds that are poisoned."""
        for fault in self._faults:
            if fault.kind == "poison" and fault.round is not None:
                num_rounds = round_number - fault.round
                if num_rounds >= 0 and (fault.rounds is None or num_rounds < fault.rounds):
                    claim(self._folder, fault)
                    values = values * POISON
        return values

    def payload(self, round_number: int, payload: "torch.Tensor") -> "torch.Tensor":
        """With one bit flipped, or all set, which is NaN; once, by the rank that is first to send in that round."""
        for fault in [*self._faults, *self._begun()]:
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
        """How many times as long an inner step takes now."""
        factor = 1.0
        for fault in self._faults + self._begun():
            if fault.kind == "slow":
                factor *= fault.factor or 1.0
        return factor

    def _begun(self) -> list[Fault]:
        """Faults that the launcher has begun; a burst of slowness for its seconds only."""
        begun = []
        for path in (self._folder / FOLDER).glob("*.begun"):
            fault = parse_fault(path.name.removesuffix(".begun"))
            if fault.kind != "slow" or time.time() - path.stat().st_mtime < (fault.seconds or 0):
                begun.append(fault)
        return begun
