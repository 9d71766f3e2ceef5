"""Load weights from a folder in Hugging Face's layout. Each rank reads only its own slices."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from inner.errors import InputError, refused
from inner.expert_names import find_expert, router_bias_name
from inner.huggingface.file_layout import FileLayout
from inner.huggingface.files import check_header, weights_files
from inner.huggingface.mixtures import is_interleaved, num_predictors
from inner.huggingface.model_config import read_config
from inner.huggingface.names import names_of
from inner.model.experts import mixtures
from inner.model.sizes import ModelSizes
from inner.model.transformer import Transformer
from inner.param_spec import ParamSpec
from inner.params import LocalParams

log = logging.getLogger(__name__)

# Names of dtypes as in safetensors.
DTYPES = ("F32", "BF16", "F16", "F64")
MOST_NAMED = 8
ROWS_AT_ONCE = 4096
OF_EXPERTS = ".experts."
FUSED = re.compile(r"\.experts\.[a-z]")
"""Part of the name of a tensor that holds a matrix of all experts."""


@dataclass(frozen=True)
class StoredWeights:
    """The memory-mapped weights of a folder, read by the parameter names that are used here."""

    folder: Path
    layout: FileLayout
    slices: dict[str, Any]

    def read(self, name: str, rows: tuple[int, int], cols: tuple[int, int]) -> Tensor:
        """Read a half-open rectangle of a parameter, seen as an fp32 matrix. Raises InputError if
        it has a non-finite value.
        """
        their_name = self.layout.name(name)
        stored = self.slices[their_name]
        order = self.layout.rows(name, range(*rows))
        # The rows in another order are within the same head, or nearly so: few others are read.
        first, end = rows if order is None else (min(order), max(order) + 1)
        if self.layout.has_columns_first(name):
            values = stored[slice(*cols), first:end].t()
        else:
            values = (
                stored[first:end, slice(*cols)]
                if len(stored.get_shape()) == 2
                else stored[first:end]
            )
        values = values.reshape(-1, cols[1] - cols[0]).float()
        if order is not None:
            values = values[torch.tensor(order) - first]
        if not torch.isfinite(values).all():
            raise InputError(
                f"{self.folder}: {their_name} contains values that are not finite; use other "
                "weights"
            )
        return values


def read_layout(folder: Path, sizes: ModelSizes) -> FileLayout:
    """Return how a folder with a supported config.json names and arranges the tensors of its model.
    Raises InputError if the config.json is missing or damaged.
    """
    config = read_config(folder)
    return FileLayout(sizes, config["model_type"], is_interleaved(config), num_predictors(config))


@contextmanager
def open_weights(
    folder: Path, specs: Sequence[ParamSpec], layout: FileLayout
) -> Iterator[StoredWeights]:
    """Map the weights of a model with the parameters `specs`, and the biases of its routers. Raises
    InputError that names each tensor that does not fit.
    """
    expected = [*specs, *layout.biases]
    slices: dict[str, Any] = {}
    with ExitStack() as files:
        for path in weights_files(folder):
            with refused(f"{path}: cannot be read as safetensors", "copy it again"):
                check_header(path)
                file = files.enter_context(safe_open(path, framework="pt"))
            # Old exports contain RoPE's table, which is computed from the config here.
            ignored = ("rotary_emb.inv_freq", *names_of(layout.model_type).ignored)
            names = [name for name in file.keys() if not name.endswith(ignored)]  # noqa: SIM118
            slices |= {layout.full_name(name): file.get_slice(name) for name in names}
        if is_tied(specs):
            _leave_out_head(folder, slices, layout)
        _leave_out_predictors(folder, slices, layout)
        _leave_out_copies(folder, slices, layout)
        _check_experts(folder, slices, specs)
        _check(
            folder,
            slices,
            {layout.name(spec.name): layout.shape(spec.name, spec.shape) for spec in expected},
        )
        yield StoredWeights(folder, layout, slices)
        slices.clear()


def is_tied(specs: Sequence[ParamSpec]) -> bool:
    """Return whether a whole model with these parameters uses its embedding as its head."""
    names = {spec.name for spec in specs}
    return "embed.weight" in names and "head.weight" not in names


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two stored tensors are equal. They are compared a few rows at a time."""
    kinds = [
        None if each is None else (each.get_shape(), each.get_dtype()) for each in (one, other)
    ]
    if kinds[0] != kinds[1] or len(one.get_shape()) != 2:
        return False
    starts = range(0, one.get_shape()[0], ROWS_AT_ONCE)
    return all(
        torch.equal(one[at : at + ROWS_AT_ONCE], other[at : at + ROWS_AT_ONCE]) for at in starts
    )


def _leave_out_head(folder: Path, slices: dict[str, Any], layout: FileLayout) -> None:
    """Remove the head of a tied model. Raises InputError if it is not a copy of the embedding."""
    head = layout.name("head.weight")
    embedding = layout.name("embed.weight")
    if head in slices and not _are_equal(slices[head], slices.get(embedding)):
        raise InputError(
            f"{folder}: {head} differs from {embedding}, but tie_word_embeddings in its "
            "config.json says that they are equal; set it to false if the model has a head of its "
            "own, or remove the tensor"
        )
    slices.pop(head, None)


def _leave_out_predictors(folder: Path, slices: dict[str, Any], layout: FileLayout) -> None:
    """Remove the tensors of layers that predict further tokens, and say so."""
    names = [name for name in slices if layout.is_of_predictor(name)]
    if not names:
        return
    for name in names:
        del slices[name]
    log.warning(
        "%s: %d tensors of layers that predict further tokens (num_nextn_predict_layers) are left "
        "out, because this model does not have such layers; what they have learned is lost, and "
        "an export will not have them",
        folder,
        len(names),
    )


def _leave_out_copies(folder: Path, slices: dict[str, Any], layout: FileLayout) -> None:
    """Remove the copies of the tables in layers that predict further tokens. Raises InputError if
    one differs from its table.
    """
    for copy, ours in layout.copies.items():
        table = layout.name(ours)
        if copy in slices and not _are_equal(slices[copy], slices.get(table)):
            raise InputError(
                f"{folder}: {copy} differs from {table}, but all depths have one embedding and one "
                "head here; leave model.predict out"
            )
        slices.pop(copy, None)


def _check_experts(folder: Path, slices: dict[str, Any], specs: Sequence[ParamSpec]) -> None:
    """Raise InputError if only one of the folder and the model has experts, or if a tensor holds
    those of a whole layer.
    """
    if fused := [name for name in slices if FUSED.search(name)]:
        raise InputError(
            f"{folder}: {_list_some(fused)}: holds a matrix of all experts of a layer, and only "
            "files with a tensor per expert are read; load the model with transformers 5 and save "
            "it with save_pretrained, which writes such files"
        )
    has_experts = any(OF_EXPERTS in name for name in slices)
    wants_experts = any(find_expert(spec.name) is not None for spec in specs)
    if has_experts and not wants_experts:
        raise InputError(
            f"{folder}: its tensors are those of a mixture of experts, but the model in its "
            "config.json is dense; use "
            "the config.json that belongs to these weights"
        )
    if wants_experts and not has_experts:
        raise InputError(
            f"{folder}: its tensors are those of a dense model, but the model in its config.json "
            "is a mixture of experts; use the config.json that belongs to these weights"
        )


def _check(folder: Path, slices: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    found = {
        name: (tuple(stored.get_shape()), stored.get_dtype()) for name, stored in slices.items()
    }
    both = [(name, *found[name]) for name in expected if name in found]
    problems = {
        "missing": [name for name in expected if name not in found],
        "not of this model": [name for name in found if name not in expected],
        "of another shape": [
            f"{name} has shape {shape}, not {expected[name]}"
            for name, shape, _ in both
            if shape != expected[name]
        ],
        f"of another dtype than {', '.join(DTYPES)}": [
            f"{name} is {dtype}" for name, _, dtype in both if dtype not in DTYPES
        ],
    }
    lines = "\n".join(
        f"  {problem}: {_list_some(names)}" for problem, names in problems.items() if names
    )
    if lines:
        raise InputError(f"{folder}: its tensors do not fit the model in its config.json:\n{lines}")


def load_weights(params: LocalParams, stages: Sequence[Transformer], folder: Path) -> None:
    """Fill every parameter, table and router's bias of materialised stages, sharded or not. No
    communication.

    Raises InputError if the folder does not hold this model; some parameters may have been filled
    by then.
    """
    for stage in stages:
        stage.fill_tables()
    layout = read_layout(folder, stages[0].sizes)
    with open_weights(folder, params.specs, layout) as stored:
        for index, param_slice in enumerate(params.slices):
            params.write(index, stored.read(param_slice.name, param_slice.rows, param_slice.cols))
        if layout.biases:
            for mixture in mixtures(stages):
                bias_X1 = stored.read(
                    router_bias_name(mixture.layer), (0, mixture.config.number), (0, 1)
                )
                mixture.router.bias.copy_(bias_X1.flatten())


def read_whole(folder: Path, specs: Sequence[ParamSpec], sizes: ModelSizes) -> dict[str, Tensor]:
    """Read every parameter of the folder's model in fp32, and the biases of its routers if it has
    any, by the names used here. Raises InputError if it is another model.
    """
    layout = read_layout(folder, sizes)
    with open_weights(folder, specs, layout) as stored:
        shapes = [(spec, *spec.matrix_shape) for spec in (*specs, *layout.biases)]
        return {
            spec.name: stored.read(spec.name, (0, m), (0, n)).view(spec.shape)
            for spec, m, n in shapes
        }


def _list_some(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
