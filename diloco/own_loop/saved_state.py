"""The state of an island's outer loop as its own loop saves it: a dict that `torch.load` reads with weights_only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from diloco.errors import ConfigError
from diloco.runtime.progress import ResumePoint

VERSION = 1
_POINT = TypeAdapter(ResumePoint)


@dataclass(frozen=True)
class SavedState:
    """One rank's state between two steps, with no round in flight."""

    facts: object
    """Of `OuterLoop.save`."""
    tensors: Mapping[str, Tensor]
    point: ResumePoint
    run_hash: str

    def to_dict(self) -> dict[str, Any]:
        """As a dict of plain values and copies of the tensors."""
        tensors = {name: values.clone() for name, values in self.tensors.items()}
        place = asdict(self.point)
        return {"version": VERSION, "run": self.run_hash, "facts": self.facts, "tensors": tensors, "place": place}

    def check(self, run_hash: str) -> None:
        """Raise ConfigError if the state is of another run than the one with this hash."""
        if self.run_hash != run_hash:
            raise ConfigError(
                f"the saved state is of a run with the hash {self.run_hash}, and this run's is {run_hash}: the config "
                "or the model's parameters have changed; begin without `state`, or with what was saved with this config"
            )


def parse_state(saved: Mapping[str, Any]) -> SavedState:
    """The state in a dict that `to_dict` made. Raises ConfigError for anything else."""
    try:
        if saved["version"] != VERSION:
            raise ConfigError(f"the saved state has version {saved['version']}; this program reads {VERSION}")
        tensors = {str(name): values for name, values in saved["tensors"].items() if isinstance(values, Tensor)}
        return SavedState(saved["facts"], tensors, _POINT.validate_python(saved["place"]), str(saved["run"]))
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise ConfigError(
            f"`state` is not what Islands.state_dict returned ({type(error).__name__}: {error}); give this rank's"
        ) from None
