"""All readers of files that others have written, each with a valid file that it reads."""

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import zstandard
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from diloco.config.from_swarm import parse_swarm_config
from diloco.config.schema import Config, dump_config, parse_config
from diloco.errors import ConfigError
from diloco.own_loop.saved_state import read_state, write_state
from inner.checkpoint.folder import SavedCheckpoint, list_published
from inner.checkpoint.index import read_index
from inner.checkpoint.manifest import FORMER_INDEX, INDEX, MANIFEST
from inner.data.chat.encode import encode_conversation
from inner.data.sources.documents import TextField
from inner.data.sources.files import FilesSource
from inner.data.token_files.open_files import open_token_files
from inner.data.tokenizer import build_tokenizer
from inner.errors import InputError
from inner.huggingface.file_layout import layout_of_export
from inner.huggingface.files import INDEX as WEIGHTS_INDEX
from inner.huggingface.files import WEIGHTS, weights_files
from inner.huggingface.load import open_weights
from inner.huggingface.model_config import CONFIG, read_model_config
from inner.huggingface.tokenizer_files import write_tokenizer
from inner.measure.param_specs import param_specs
from tests.inner.data import token_files_of_others as others
from tests.inner.folders import BYTE_SIZES, spread_model, write_folder
from tests.inner.former_checkpoint import write_fitting_manifest

CHECKPOINT = Path(__file__).parents[1] / "inner/checkpoint/written_before/step-00000003"
TEXTS = ["a first text", "caf\u00e9 " * 40, "", "the last one\nof two lines"]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]


@dataclass(frozen=True)
class Reader:
    """One kind of file."""

    prepare: Callable[[Path], Path]
    """Writes a folder of valid files, and gives the file to be changed."""
    read: Callable[[Path], object]
    """Reads the file, or the folder that it is in, to the end."""
    is_json: bool = False
    error: type[Exception] = InputError
    """The one that it declares."""


def _write(name: str, data: bytes) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return prepare


def _read_texts(path: Path) -> None:
    for _ in FilesSource((str(path),), TextField("text")).documents():
        pass


def _read_chat(path: Path) -> None:
    tokenizer = build_tokenizer("bytes")
    for document in FilesSource((str(path),), TextField("messages", is_chat=True)).documents():
        encode_conversation(tokenizer, document.text, "chatml")


def _read_tokens(path: Path) -> None:
    entry = {".idx": path.with_suffix(".bin"), ".index": path.with_suffix("")}.get(
        path.suffix, path
    )
    for file in open_token_files([str(entry)], "uint16"):
        file.tokens[:100].sum()


LINES = "".join(
    json.dumps({"text": text, "id": [1, {"a": None}]}) + "\n" for text in TEXTS
).encode()
CHAT_LINES = "".join(json.dumps({"messages": CHAT}) + "\n" for _ in range(3)).encode()


def _parquet() -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table({"text": TEXTS * 20, "id": list(range(80))})
    pyarrow.parquet.write_table(table, buffer, compression="zstd", row_group_size=30)
    return buffer.getvalue()


def _tar(mode: Any, kind: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=kind) as archive:
        for name, data in (
            ("a.txt", b"text"),
            ("b" * 150 + ".txt", b"more"),
            ("c.json", b'{"text": "x"}'),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _tokenizer() -> bytes:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("  ", " ")])
    split = pre_tokenizers.Split("[0-9]", "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<unk>", "</s>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.enable_truncation(8)
    return tokenizer.to_str().encode()


def _read_tokenizer(path: Path) -> None:
    tokenizer = build_tokenizer(str(path.parent / "tokenizer.json"))
    tokenizer.decode(tokenizer.encode("the first 123 caf\u00e9 text </s>"))
    encode_conversation(tokenizer, json.dumps([["user", "Hi"], ["assistant", "Hello."]]), "chatml")


def _beside_a_tokenizer(name: str, data: bytes) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        (folder / "tokenizer.json").write_bytes(_tokenizer())
        (folder / name).write_bytes(data)
        return folder / name

    return prepare


def _export_tokenizer(path: Path) -> None:
    _read_tokenizer(path)
    out = path.parent / "out"
    out.mkdir(exist_ok=True)
    write_tokenizer((str(path.parent / "tokenizer.json"), None, None), out, 32)


def _model(name: str) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        shard_bytes = 20_000 if name == WEIGHTS_INDEX else 5 * 10**9
        write_folder(folder / "model", spread_model(), shard_bytes=shard_bytes)
        return folder / "model" / name

    return prepare


def _read_weights(path: Path) -> None:
    specs = param_specs(BYTE_SIZES)
    with open_weights(path.parent, specs, layout_of_export(BYTE_SIZES)) as stored:
        for spec in specs:
            stored.read(spec.name, (0, spec.matrix_shape[0]), (0, spec.matrix_shape[1]))


def _checkpoint(name: str) -> Callable[[Path], Path]:
    def prepare(folder: Path) -> Path:
        shutil.copytree(CHECKPOINT, folder / "checkpoints" / CHECKPOINT.name)
        return folder / "checkpoints" / CHECKPOINT.name / name

    return prepare


def _manifest(folder: Path) -> Path:
    """A checkpoint whose manifest is its JSON alone."""
    path = _checkpoint(MANIFEST)(folder)
    path.write_bytes(path.read_bytes().partition(b"\n")[2])
    return path


def _index(folder: Path) -> Path:
    """The index of a checkpoint in the present format."""
    path = _checkpoint(INDEX)(folder)
    path.with_name(FORMER_INDEX).unlink()
    for file in path.parent.glob("*.distcp"):
        file.unlink()
    path.with_name("rank-0.tensors").write_bytes(bytes(24))
    chunk = {"file": "rank-0.tensors", "start": 0, "offsets": [0, 0], "sizes": [2, 3]}
    path.write_text(
        json.dumps(
            {"tensors": {"params/w": {"dtype": "float32", "shape": [2, 3], "chunks": [chunk]}}}
        )
    )
    write_fitting_manifest(path.parent)
    return path


def _write_manifest(path: Path, text: bytes) -> None:
    """With the hash that fits, as whoever writes a manifest by hand gives it."""
    path.write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)


def _find_checkpoint(folder: Path) -> SavedCheckpoint:
    found, problems = list_published(folder)
    if problems:
        raise InputError(problems[0])
    return found[0]


def _read_manifest(path: Path) -> None:
    _write_manifest(path, path.read_bytes())
    _find_checkpoint(path.parent.parent)


def _read_index(path: Path) -> None:
    manifest = path.with_name(MANIFEST)
    values = json.loads(manifest.read_bytes().partition(b"\n")[2])
    spec = {
        "size_bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    _write_manifest(
        manifest, json.dumps({**values, "files": {**values["files"], path.name: spec}}).encode()
    )
    read_index(_find_checkpoint(path.parent.parent))


def _header(folder: Path) -> Path:
    """The header of a safetensors file, beside the file."""
    raw = _model(WEIGHTS)(folder).read_bytes()
    path, end = folder / "model" / "header", 8 + int.from_bytes(raw[:8], "little")
    path.write_bytes(raw[8:end])
    path.with_name("values").write_bytes(raw[end:])
    return path


def _read_header(path: Path) -> None:
    header = path.read_bytes()
    values = path.with_name("values").read_bytes()
    path.with_name(WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + values)
    _read_weights(path)


def _state(folder: Path) -> Path:
    path = folder / "state.safetensors"
    write_state(
        {"version": 1, "facts": {"round": 3}, "tensors": {"a": torch.ones(4)}, "run": "x"}, path
    )
    return path


def _token_file(write: Callable[..., Path], suffix: str) -> Callable[[Path], Path]:
    return lambda folder: Path(f"{write(folder / 'text').with_suffix('')}{suffix}")


TOKENIZER_CONFIG = (
    b'{"eos_token": {"content": "</s>"}, "bos_token": null, "model_max_length": '
    b'1e30, "chat_template": "{{x}}"}'
)
TEMPLATE = (
    b"{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
)
CONFIG_TEXT = dump_config(Config()).encode()
RUN_TEXT = dump_config(Config().run).encode()
READERS = {
    "jsonl": Reader(_write("a.jsonl", LINES), _read_texts),
    "jsonl.gz": Reader(_write("a.jsonl.gz", gzip.compress(LINES)), _read_texts),
    "jsonl.zst": Reader(_write("a.jsonl.zst", zstandard.compress(LINES)), _read_texts),
    "json": Reader(
        _write("a.json", json.dumps([{"text": text} for text in TEXTS]).encode()),
        _read_texts,
        is_json=True,
    ),
    "conversations": Reader(_write("a.jsonl", CHAT_LINES), _read_chat),
    "conversation": Reader(
        _write("a.json", json.dumps([{"messages": CHAT}]).encode()), _read_chat, is_json=True
    ),
    "parquet": Reader(_write("a.parquet", _parquet()), _read_texts),
    "tar": Reader(_write("a.tar", _tar("w", tarfile.PAX_FORMAT)), _read_texts),
    "tar.gz": Reader(_write("a.tar.gz", _tar("w:gz", tarfile.GNU_FORMAT)), _read_texts),
    "txt.gz": Reader(_write("a.txt.gz", gzip.compress(b"text")), _read_texts),
    "npy": Reader(_token_file(others.write_numpy, ".npy"), _read_tokens),
    "megatron": Reader(_token_file(others.write_megatron, ".idx"), _read_tokens),
    "datatrove": Reader(_token_file(others.write_datatrove, ".ds.index"), _read_tokens),
    "tokenizer.json": Reader(_write("tokenizer.json", _tokenizer()), _read_tokenizer, is_json=True),
    "tokenizer_config.json": Reader(
        _beside_a_tokenizer("tokenizer_config.json", TOKENIZER_CONFIG),
        _export_tokenizer,
        is_json=True,
    ),
    "chat_template.jinja": Reader(
        _beside_a_tokenizer("chat_template.jinja", TEMPLATE), _export_tokenizer
    ),
    "config.json": Reader(
        _model(CONFIG), lambda path: read_model_config(path.parent), is_json=True
    ),
    "safetensors": Reader(_model(WEIGHTS), _read_weights),
    "header of safetensors": Reader(_header, _read_header, is_json=True),
    "index of safetensors": Reader(
        _model(WEIGHTS_INDEX), lambda path: weights_files(path.parent), is_json=True
    ),
    "manifest": Reader(_manifest, _read_manifest, is_json=True),
    "pickled index of a checkpoint": Reader(_checkpoint(FORMER_INDEX), _read_index),
    "index of a checkpoint": Reader(_index, _read_index, is_json=True),
    "state of an own loop": Reader(_state, read_state, error=ConfigError),
    "config": Reader(
        _write("run.yaml", CONFIG_TEXT), lambda path: parse_config(_text(path)), error=ConfigError
    ),
    "config of a swarm": Reader(
        _write("run.yaml", RUN_TEXT),
        lambda path: parse_swarm_config(_text(path)),
        error=ConfigError,
    ),
}


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")
