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

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a dict of plain values and copies of the tensors."""
        tensors = {name: values.clone() for name, values in self.tensors.items()}
        place = asdict(self.point)
        return {"version": VERSION, "run": self.run_hash, "facts": self.facts, "tensors": tensors, "place": place}

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
            raise ConfigError(f"the saved state has version {saved['version']}; this program reads {VERSION}")
        tensors = {str(name): values for name, values in saved["tensors"].items() if isinstance(values, Tensor)}
        return SavedState(saved["facts"], tensors, _POINT.validate_python(saved["place"]), str(saved["run"]))
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise ConfigError(
            f"`state` is not what Islands.state_dict returned ({type(error).__name__}: {error}); give this rank's"
        ) from None


def write_state(state: Mapping[str, Any], path: Path) -> None:
    """Write the result of `Islands.state_dict` as a safetensors file."""
    rest = {key: value for key, value in state.items() if key != "tensors"}
    save_file({name: values.contiguous() for name, values in state["tensors"].items()}, path, {KEY: json.dumps(rest)})


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
