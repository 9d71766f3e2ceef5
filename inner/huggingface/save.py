"""Export a model in Hugging Face's layout (safetensors, config.json, tokenizer), completely or not
at all.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from inner.errors import InputError
from inner.expert_names import is_router_bias
from inner.huggingface.file_layout import FileLayout, layout_of_export
from inner.huggingface.files import INDEX
from inner.huggingface.model_config import CONFIG, build_config_json, one_or_list
from inner.huggingface.tokenizer_files import COMPANIONS, TOKENIZER, write_tokenizer
from inner.model.sizes import ModelSizes

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARD_BYTES = 5 * 10**9
GENERATION = "generation_config.json"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class Export:
    """Settings of an export."""

    sizes: ModelSizes
    seq_len: int
    """Length of the longest sequences that the model is for."""
    tokenizer: str
    """Value of data.tokenizer."""
    dtype: Dtype = "float32"
    shard_bytes: int = SHARD_BYTES
    """Maximum size of a weights file in bytes. A larger tensor gets a file of its own."""
    eos: str | None = None
    bos: str | None = None
    """Values of data.eos and data.bos."""
    bos_id: int | None = None
    """Id with which users of the model begin a text. None: the tokenizer's."""
    eos_ids: tuple[int, ...] = ()
    """Ids with which the model ends a text. Empty: the tokenizer's eos."""


def save_model(
    tensors: Mapping[str, Tensor], export: Export, out: Path, *, overwrite: bool = False
) -> None:
    """Write full fp32 tensors, named as here, and all other files that `transformers` needs into
    the folder `out`.

    `tensors`: the parameters, and the biases of routers where they are not zero. The export is
    written next to `out` and renamed at the end. Raises InputError if no model type computes the
    model, or if `out` cannot be written, or if it exists. With `overwrite`, an existing `out` is
    replaced if it is an export, and otherwise refused.
    """
    out = out.absolute()
    check_target(out, overwrite=overwrite)
    layout = layout_of_export(export.sizes)
    tensors = _with_biases(tensors, layout)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write_weights(tensors, export, layout, partial)
        bos_id, eos_id = write_tokenizer(
            (export.tokenizer, export.eos, export.bos), partial, export.seq_len
        )
        bos_id = bos_id if export.bos_id is None else export.bos_id
        eos_ids = export.eos_ids or (eos_id,)
        _write_json(
            partial / CONFIG,
            build_config_json(export.sizes, export.seq_len, export.dtype, bos_id, eos_ids),
        )
        _write_json(
            partial / GENERATION, {"bos_token_id": bos_id, "eos_token_id": one_or_list(eos_ids)}
        )
        _move_into_place(partial, out)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{out}: cannot be written: {error}; give a folder on a disk with room"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(out: Path, *, overwrite: bool) -> None:
    """Raise InputError if `out` exists and may not be overwritten."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise InputError(
            f"{out} exists; choose another folder, or give --overwrite to replace an export"
        )
    known = {CONFIG, GENERATION, INDEX, TOKENIZER, *COMPANIONS}
    if not out.is_dir() or out.is_symlink():
        raise InputError(f"{out} is not a folder and will not be overwritten; choose another")
    others = sorted(
        path.name
        for path in out.iterdir()
        if path.name not in known and not OURS.fullmatch(path.name)
    )
    if others:
        raise InputError(
            f"{out} holds files that are not part of an export ({', '.join(others[:8])}), and will "
            "not be overwritten; choose another folder"
        )


def _with_biases(tensors: Mapping[str, Tensor], layout: FileLayout) -> dict[str, Tensor]:
    """Return the parameters and the biases that the folder needs. Raises InputError if routers have
    biases that the model type cannot express.
    """
    params = {name: tensor for name, tensor in tensors.items() if not is_router_bias(name)}
    biases = {name: tensor for name, tensor in tensors.items() if is_router_bias(name)}
    if layout.biases:
        zeros = {spec.name: torch.zeros(spec.shape) for spec in layout.biases}
        return params | zeros | biases
    if any(bias.any() for bias in biases.values()):
        largest = max(float(bias.abs().max()) for bias in biases.values())
        raise InputError(
            f"this model cannot be exported: biases chose its experts (up to {largest:.3g}), and "
            f"{layout.model_type} has none; train with optimizer.balance.bias_speed=0 to get a "
            "model that can be exported"
        )
    return params


def _write_weights(
    tensors: Mapping[str, Tensor], export: Export, layout: FileLayout, folder: Path
) -> None:
    """Write one file, or several and an index. Tensors are converted one file at a time to save
    memory.
    """
    import huggingface_hub

    ours = {layout.name(name): name for name in tensors} | layout.copies
    # Use the meta device, because only the sizes are needed.
    shapes = {
        theirs: torch.empty(
            layout.shape(name, tuple(tensors[name].shape)),
            dtype=_stored_dtype(name, export),
            device="meta",
        )
        for theirs, name in ours.items()
    }
    split = huggingface_hub.split_torch_state_dict_into_shards(
        shapes, max_shard_size=export.shard_bytes
    )
    for file, names in split.filename_to_tensors.items():
        stored = {}
        for theirs in names:
            name = ours[theirs]
            arranged = _arrange(tensors, name, layout)
            arranged = arranged.to(_stored_dtype(name, export)).contiguous()
            # safetensors refuses tensors that share memory.
            stored[theirs] = arranged.clone() if theirs in layout.copies else arranged
        save_file(stored, folder / file, {"format": "pt"})
    if split.is_sharded:
        _write_json(
            folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        )


def _stored_dtype(name: str, export: Export) -> torch.dtype:
    """Return the dtype of a tensor in the folder. The biases of routers are always fp32."""
    return torch.float32 if is_router_bias(name) else DTYPES[export.dtype]


def _arrange(tensors: Mapping[str, Tensor], name: str, layout: FileLayout) -> Tensor:
    """Return the folder's tensor that holds a parameter, perhaps together with others."""
    parts = layout.parts(name)
    whole = tensors[name]
    if len(parts) > 1 or layout.rows(name, range(len(whole))) is not None:
        whole = whole.new_empty(sum(len(tensors[part]) for part in parts), *whole.shape[1:])
        for part in parts:
            order = layout.rows(part, range(len(tensors[part])))
            whole[torch.tensor(order)] = tensors[part]
    return whole.t() if layout.has_columns_first(name) else whole


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _move_into_place(partial: Path, out: Path) -> None:
    if not out.exists():
        partial.rename(out)
        return
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    out.rename(old)
    partial.rename(out)
    shutil.rmtree(old)
