"""Reads weights from a folder in Hugging Face's layout: a rank reads its own slices and nothing else."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from inner.errors import InputError
from inner.huggingface.files import weights_files
from inner.huggingface.names import is_computed, their_name
from inner.model import Transformer
from inner.params import LocalParams, ParamSpec

# By the names that safetensors has for them.
DTYPES = ("F32", "BF16", "F16", "F64")
MOST_NAMED = 8


class StoredWeights:
    """The open weights of a folder, by our names; a context manager. They are mapped, not read."""

    def __init__(self, folder: Path, specs: Sequence[ParamSpec]) -> None:
        """`specs`: the model that they must be. Raises InputError naming each tensor that is not as it should be."""
        self.folder = folder
        self._opened = ExitStack()
        self._slices: dict[str, Any] = {}
        try:
            self._open()
            self._check(specs)
        except BaseException:
            self._opened.close()
            raise

    def __enter__(self) -> "StoredWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._opened.close()

    def read(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """The half-open rectangle of a parameter seen as a matrix, fp32. Raises InputError if it is not finite."""
        stored = self._slices[their_name(name)]
        is_matrix = len(stored.get_shape()) == 2
        values = stored[slice(*rows), slice(*cols)] if is_matrix else stored[slice(*rows)]
        values = values.view(-1, cols[1] - cols[0]).float()
        if not torch.isfinite(values).all():
            raise InputError(f"{self.folder}: {their_name(name)} holds values that are not finite; take other weights")
        return values

    def _open(self) -> None:
        for path in weights_files(self.folder):
            try:
                file = self._opened.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: torch cannot map the file.
                raise InputError(f"{path}: cannot be read as safetensors ({error}); copy it again") from None
            self._slices |= {name: file.get_slice(name) for name in file.keys() if not is_computed(name)}  # noqa: SIM118

    def _check(self, specs: Sequence[ParamSpec]) -> None:
        expected = {their_name(spec.name): spec.shape for spec in specs}
        found = {name: (tuple(stored.get_shape()), stored.get_dtype()) for name, stored in self._slices.items()}
        both = [name for name in expected if name in found]
        problems = {
            "missing": [name for name in expected if name not in found],
            "not of this model": [name for name in found if name not in expected],
            "of another shape": [
                f"{name} is {found[name][0]}, not {expected[name]}" for name in both if found[name][0] != expected[name]
            ],
            f"of another dtype than {', '.join(DTYPES)}": [
                f"{name} is {found[name][1]}" for name in both if found[name][1] not in DTYPES
            ],
        }
        lines = "\n".join(f"  {problem}: {_some(names)}" for problem, names in problems.items() if names)
        if lines:
            raise InputError(
                f"{self.folder}: its tensors are not those of the model that its config.json has:\n{lines}"
            )


def load_weights(params: LocalParams, parts: Sequence[Transformer], folder: Path) -> None:
    """Fills every parameter and table of materialised parts of a model, sharded or not. No communication.

    Raises InputError where the folder does not hold this model; by then some parameters may be filled.
    """
    with StoredWeights(folder, params.specs) as stored:
        for index, held in enumerate(params.slices):
            params.write(index, stored.read(held.name, held.rows, held.cols))
    for part in parts:
        part.fill_tables()


def read_whole(folder: Path, specs: Sequence[ParamSpec]) -> dict[str, Tensor]:
    """Every parameter of the folder's model, in fp32 and its own shape, by our names. Raises InputError."""
    with StoredWeights(folder, specs) as stored:
        return {
            spec.name: stored.read(spec.name, (0, spec.matrix_shape[0]), (0, spec.matrix_shape[1])).view(spec.shape)
            for spec in specs
        }


def _some(names: Sequence[str]) -> str:
    """The names, or the first of them and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
