"""The state of an island's outer loop for its own loop to save: a dict that `torch.load` reads with
weights_only.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from diloco.errors import ConfigError
from diloco.runtime.progress import ResumePoint
from inner.errors import InputError, refused
from inner.huggingface.files import check_header
from outer.space.ranks import RankGroup

VERSION = 1
KEY = "islands"
_POINT = TypeAdapter(ResumePoint)


@dataclass(frozen=True)
class SavedState:
    """One rank's state between two steps, with no round in flight."""

    facts: object
    """The facts that `OuterLoop.save` returned."""
    tensors: Mapping[str, Tensor]
    point: ResumePoint
    run_hash: str
    num_ranks: int | None = None
    """Number of ranks of the island; None in a state of an earlier version."""

    @property
    def digest(self) -> object:
        """Digest of the committed state, which is the same on all ranks of one save."""
        return self.facts.get("digest") if isinstance(self.facts, dict) else None

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict of plain values and copies of the tensors."""
        tensors = {name: values.clone() for name, values in self.tensors.items()}
        place = asdict(self.point)
        kinds = {"version": VERSION, "run": self.run_hash, "ranks": self.num_ranks}
        return kinds | {"facts": self.facts, "tensors": tensors, "place": place}

    def check(self, run_hash: str) -> None:
        """Raise ConfigError if the state belongs to a run with another hash."""
        if self.run_hash != run_hash:
            raise ConfigError(
                f"the saved state is of a run with the hash {self.run_hash}, and this run's hash "
                f"is {run_hash}: the config or the model's parameters have changed; begin without "
                "`state`, or with a state saved with this config"
            )


def parse_state(saved: Mapping[str, Any]) -> SavedState:
    """Return the state in a dict that `to_dict` made. Raises ConfigError for any other content."""
    try:
        if saved["version"] != VERSION:
            raise ConfigError(
                f"the saved state has version {saved['version']}; this program reads {VERSION}"
            )
        tensors = {
            str(name): values
            for name, values in saved["tensors"].items()
            if isinstance(values, Tensor)
        }
        point = _POINT.validate_python(saved["place"])
        return SavedState(saved["facts"], tensors, point, str(saved["run"]), saved.get("ranks"))
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise ConfigError(
            f"`state` is not what Islands.state_dict returned ({type(error).__name__}: {error}); "
            "give this rank's"
        ) from None


def load_state(state: Mapping[str, Any] | str | Path | None, ranks: RankGroup) -> SavedState | None:
    """Return the state that was given to this rank: a dict, or the folder with a file per rank.

    Raises ConfigError if the folder has no file for this rank, or one of an island of other ranks.
    """
    if state is None:
        return None
    where = "the saved state"
    if isinstance(state, str | Path):
        path = state_path(Path(state), ranks.rank)
        where = str(path)
        if not path.exists():
            raise ConfigError(
                f"{path} does not exist: the folder has no state of Islands for rank {ranks.rank}. "
                "Give a folder of Islands.save of an island with as many ranks. Without `state` "
                "(with a trainer: load the checkpoint's model and do not resume) the island takes "
                "the state of the others, or begins a new run if it is alone"
            )
        state = read_state(path)
    saved = parse_state(state)
    if saved.num_ranks not in (None, ranks.num_ranks):
        raise ConfigError(
            f"{where} is of an island of {saved.num_ranks} ranks, and this one has "
            f"{ranks.num_ranks}: resume with as "
            "many, or without `state`, so that the island takes the state of the others"
        )
    return saved


def check_same_save(saved: SavedState | None, ranks: RankGroup) -> None:
    """Raise ConfigError on every rank unless all ranks have states of one save. Every rank must
    call it.
    """
    mine = None if saved is None else (saved.digest, saved.point)
    for rank, other in enumerate(ranks.gather(mine)):
        if other != mine:
            raise ConfigError(
                f"the saved states of ranks {rank} and {ranks.rank} of this island are not of one "
                "save; give each rank the state that it saved last together with the others"
            )


def state_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's state in a folder of `Islands.save`."""
    return folder / f"islands-{rank}.safetensors"


def write_state(state: Mapping[str, Any], path: Path) -> None:
    """Write the result of `Islands.state_dict` as a safetensors file, which is there whole or not
    at all.
    """
    rest = {key: value for key, value in state.items() if key != "tensors"}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    tensors = {name: values.contiguous() for name, values in state["tensors"].items()}
    save_file(tensors, partial, {KEY: json.dumps(rest)})
    partial.replace(path)


def read_state(path: Path) -> dict[str, Any]:
    """Read a file of write_state. Raises ConfigError if it is damaged or another kind of file."""
    try:
        with refused(f"{path} holds no state of Islands", "give a file that Islands has saved"):
            check_header(path)
            with safe_open(path, framework="pt") as file:
                rest = json.loads((file.metadata() or {})[KEY])
                return rest | {"tensors": {name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118
    except InputError as error:
        raise ConfigError(str(error)) from None
