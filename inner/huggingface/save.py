"""Writes a model as Hugging Face has them: safetensors, config.json, tokenizer. Whole, or not at all."""

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
from inner.huggingface.files import INDEX
from inner.huggingface.model_config import CONFIG, their_config
from inner.huggingface.names import their_name
from inner.huggingface.tokenizer_files import COMPANIONS, TOKENIZER, write_tokenizer
from inner.presets import ModelSizes

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARD_BYTES = 5 * 10**9
GENERATION = "generation_config.json"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class Export:
    """What becomes of the tensors."""

    sizes: ModelSizes
    seq_len: int
    """The longest sequence that it was trained on."""
    tokenizer: str
    """As data.tokenizer names it."""
    dtype: Dtype = "float32"
    shard_bytes: int = SHARD_BYTES
    """Of a file at most, but for a tensor that is larger by itself."""


def save_model(tensors: Mapping[str, Tensor], export: Export, out: Path, *, overwrite: bool = False) -> None:
    """Writes whole fp32 tensors, by our names, and all that `transformers` needs into the folder `out`.

    It is written beside its place and moved there in the end. Raises InputError when `out` exists (with `overwrite`:
    when it is no export) or cannot be written.
    """
    out = out.absolute()
    check_target(out, overwrite=overwrite)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        _write_weights(tensors, export, partial)
        bos_id, eos_id = write_tokenizer(export.tokenizer, partial, export.seq_len)
        _write_json(partial / CONFIG, their_config(export.sizes, export.seq_len, export.dtype, bos_id, eos_id))
        _write_json(partial / GENERATION, {"bos_token_id": bos_id, "eos_token_id": eos_id})
        _move_into_place(partial, out)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{out}: cannot be written: {error}; give a folder on a disk with room") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_target(out: Path, *, overwrite: bool) -> None:
    """Return if a model may be written to `out`; InputError: something is there that must not go."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise InputError(f"{out} exists; choose another folder, or give --overwrite to replace an export")
    known = {CONFIG, GENERATION, INDEX, TOKENIZER, *COMPANIONS}
    if not out.is_dir() or out.is_symlink():
        raise InputError(f"{out} is no folder, and is not overwritten; choose another")
    others = sorted(path.name for path in out.iterdir() if path.name not in known and not OURS.fullmatch(path.name))
    if others:
        raise InputError(
            f"{out} holds what no export has ({', '.join(others[:8])}), and is not overwritten; choose another folder"
        )


def _write_weights(tensors: Mapping[str, Tensor], export: Export, folder: Path) -> None:
    """One file, or several and an index; a file's tensors are converted when it is written."""
    import huggingface_hub

    dtype = DTYPES[export.dtype]
    mine = {their_name(name): tensor for name, tensor in tensors.items()}
    # On the meta device: what is asked is but how large they will be.
    shapes = {name: torch.empty(tensor.shape, dtype=dtype, device="meta") for name, tensor in mine.items()}
    split = huggingface_hub.split_torch_state_dict_into_shards(shapes, max_shard_size=export.shard_bytes)
    for file, names in split.filename_to_tensors.items():
        save_file({name: mine[name].to(dtype).contiguous() for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        _write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _move_into_place(partial: Path, out: Path) -> None:
    """`partial` becomes `out`; what was there is deleted."""
    if not out.exists():
        partial.rename(out)
        return
    old = out.with_name(f".{out.name}.old-{os.getpid()}")
    out.rename(old)
    partial.rename(out)
    shutil.rmtree(old)
