"""Load weights from a folder in Hugging Face's layout. Each rank reads only its own slices."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from inner.errors import InputError, refused
from inner.huggingface.files import check_header, weights_files
from inner.huggingface.names import huggingface_name
from inner.model.transformer import Transformer
from inner.param_spec import ParamSpec
from inner.params import LocalParams

# Names of dtypes as in safetensors.
DTYPES = ("F32", "BF16", "F16", "F64")
MOST_NAMED = 8
ROWS_AT_ONCE = 4096
EMBEDDING, HEAD = (huggingface_name(name) for name in ("embed.weight", "head.weight"))


@dataclass(frozen=True)
class StoredWeights:
    """The memory-mapped weights of a folder, read by the parameter names that are used here."""

    folder: Path
    slices: dict[str, Any]

    def read(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """Read a half-open rectangle of a parameter, seen as an fp32 matrix. Raises InputError if
        it has a non-finite value.
        """
        their_name = huggingface_name(name)
        stored = self.slices[their_name]
        values = stored[slice(*rows), slice(*cols)] if len(stored.get_shape()) == 2 else stored[slice(*rows)]
        values = values.view(-1, cols[1] - cols[0]).float()
        if not torch.isfinite(values).all():
            raise InputError(f"{self.folder}: {their_name} contains values that are not finite; use other weights")
        return values


@contextmanager
def open_weights(folder: Path, specs: Sequence[ParamSpec]) -> Iterator[StoredWeights]:
    """Map the weights of a model with the parameters `specs`. Raises InputError that names each
    tensor that does not fit.
    """
    slices: dict[str, Any] = {}
    with ExitStack() as files:
        for path in weights_files(folder):
            with refused(f"{path}: cannot be read as safetensors", "copy it again"):
                check_header(path)
                file = files.enter_context(safe_open(path, framework="pt"))
            # Old exports contain RoPE's table, which is computed from the config here.
            names = [name for name in file.keys() if not name.endswith("rotary_emb.inv_freq")]  # noqa: SIM118
            slices |= {name: file.get_slice(name) for name in names}
        if is_tied(specs) and HEAD in slices and not _are_equal(slices[HEAD], slices.get(EMBEDDING)):
            raise InputError(
                f"{folder}: {HEAD} differs from {EMBEDDING}, but tie_word_embeddings in its config.json says that "
                "they are equal; set it to false if the model has a head of its own, or remove the tensor"
            )
        if is_tied(specs):
            slices.pop(HEAD, None)
        _check(folder, slices, specs)
        yield StoredWeights(folder, slices)
        slices.clear()


def is_tied(specs: Sequence[ParamSpec]) -> bool:
    """Return whether a whole model with these parameters uses its embedding as its head."""
    names = {huggingface_name(spec.name) for spec in specs}
    return EMBEDDING in names and HEAD not in names


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two stored tensors are equal. They are compared a few rows at a time."""
    kinds = [None if each is None else (each.get_shape(), each.get_dtype()) for each in (one, other)]
    if kinds[0] != kinds[1] or len(one.get_shape()) != 2:
        return False
    starts = range(0, one.get_shape()[0], ROWS_AT_ONCE)
    return all(torch.equal(one[at : at + ROWS_AT_ONCE], other[at : at + ROWS_AT_ONCE]) for at in starts)


def _check(folder: Path, slices: dict[str, Any], specs: Sequence[ParamSpec]) -> None:
    expected = {huggingface_name(spec.name): spec.shape for spec in specs}
    found = {name: (tuple(stored.get_shape()), stored.get_dtype()) for name, stored in slices.items()}
    both = [(name, *found[name]) for name in expected if name in found]
    problems = {
        "missing": [name for name in expected if name not in found],
        "not of this model": [name for name in found if name not in expected],
        "of another shape": [
            f"{name} has shape {shape}, not {expected[name]}" for name, shape, _ in both if shape != expected[name]
        ],
        f"of another dtype than {', '.join(DTYPES)}": [
            f"{name} is {dtype}" for name, _, dtype in both if dtype not in DTYPES
        ],
    }
    lines = "\n".join(f"  {problem}: {_list_some(names)}" for problem, names in problems.items() if names)
    if lines:
        raise InputError(f"{folder}: its tensors do not fit the model in its config.json:\n{lines}")


def load_weights(params: LocalParams, stages: Sequence[Transformer], folder: Path) -> None:
    """Fill every parameter and table of materialised stages, sharded or not. No communication.

    Raises InputError if the folder does not hold this model; some parameters may have been filled by then.
    """
    with open_weights(folder, params.specs) as stored:
        for index, param_slice in enumerate(params.slices):
            params.write(index, stored.read(param_slice.name, param_slice.rows, param_slice.cols))
    for stage in stages:
        stage.fill_tables()


def read_whole(folder: Path, specs: Sequence[ParamSpec]) -> dict[str, Tensor]:
    """Read every parameter of the folder's model in fp32, by the names used here. Raises InputError
    if it is another model.
    """
    with open_weights(folder, specs) as stored:
        shapes = [(spec, *spec.matrix_shape) for spec in specs]
        return {spec.name: stored.read(spec.name, (0, m), (0, n)).view(spec.shape) for spec, m, n in shapes}


def _list_some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
