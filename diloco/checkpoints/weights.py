"""A trained model's weights, from a run or from an exported folder, and what is done with them: evaluate, generate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diloco.assemble import load_corpus
from diloco.config import IslandConfig, RunConfig, parse_config
from diloco.measure import bits_per_byte
from inner.config import DataConfig
from inner.data.batches import heldout_windows
from inner.data.corpus import Corpus, Text
from inner.data.sources import build_source
from inner.data.tokenizer import Tokenizer, build_tokenizer
from inner.errors import InputError
from inner.generate import Sampling, generate, pieces_of_text
from inner.huggingface.load import read_whole
from inner.huggingface.model_config import CONFIG, model_in, read_config
from inner.huggingface.tokenizer_files import TOKENIZER
from inner.presets import ModelSizes, resolve_sizes
from inner.whole_model import build_model, specs_of, summed_loss

RUN_CONFIG = "config.yaml"
MICRO_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Weights:
    """A model as it was trained. `tensors` are whole, fp32, by full name."""

    sizes: ModelSizes
    tensors: dict[str, Tensor]
    seq_len: int
    """The longest sequence that it was trained on."""
    tokenizer: str
    """As data.tokenizer names it."""
    run: RunConfig | None = None
    """Of which these are the global params; None: the weights are of an exported folder."""
    island: IslandConfig | None = None
    """The run's first island: where its text is."""


@dataclass(frozen=True)
class Evaluation:
    """The loss on a text."""

    loss: float
    """Nats a token."""
    bits_per_byte: float
    tokens: int


def open_weights(path: Path, island: str | None = None) -> Weights:
    """The weights of an exported folder, or the global params of a run: `path` is its folder or one checkpoint.

    `island`: as this one has saved them; None: the one that has saved the latest round. Raises InputError.
    """
    if (path / CONFIG).is_file():
        return _open_folder(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; give a run's folder, a checkpoint, or an exported model")
    # Only a run's checkpoints need torch's.
    from diloco.global_params import read_global_params, run_folder

    run, tensors = read_global_params(path, island)
    config = run_folder(path) / RUN_CONFIG
    own = parse_config(config.read_text(), where=str(config)).for_island(0) if config.is_file() else None
    sizes = resolve_sizes(run.model, build_tokenizer(run.data.tokenizer).vocab_size)
    return Weights(sizes, tensors, run.data.seq_len, run.data.tokenizer, run, own)


def _open_folder(folder: Path) -> Weights:
    sizes = resolve_sizes(model_in(folder), 0)
    seq_len = read_config(folder).get("max_position_embeddings")
    if not isinstance(seq_len, int) or seq_len < 1:
        raise InputError(f"{folder / CONFIG}: max_position_embeddings is {seq_len!r}; allowed: a number of tokens")
    return Weights(sizes, read_whole(folder, specs_of(sizes)), seq_len, str(folder / TOKENIZER))


def heldout_text(weights: Weights) -> Corpus:
    """The held-out text of the run. InputError: an exported folder has none."""
    if weights.run is None or weights.island is None:
        raise InputError("an exported folder has no held-out text of its own; name files or folders of text")
    return load_corpus(weights.run, weights.island)


def text_in(paths: Sequence[str], weights: Weights, num_tokens: int | None) -> Corpus:
    """All text of files and folders, as held-out text; with `num_tokens` the documents that have so many."""
    field = DataConfig().text_field if weights.run is None else weights.run.data.text_field
    tokenizer = build_tokenizer(weights.tokenizer)
    pieces: list[np.ndarray] = []
    found_tokens = found_bytes = 0
    for document in build_source(DataConfig(source="files", paths=list(paths), text_field=field)).documents():
        pieces.append(np.append(tokenizer.encode(document.text), np.uint32(tokenizer.eos_id)))
        found_tokens += len(pieces[-1])
        found_bytes += len(document.text.encode("utf-8", "replace"))
        if num_tokens is not None and found_tokens > num_tokens:
            break
    text = Text(np.empty(0, dtype=np.uint32), np.concatenate(pieces), found_bytes)
    return Corpus((text,), tokenizer.vocab_size, tokenizer.eos_id)


def heldout_tokens(corpus: Corpus) -> int:
    """Of all its texts."""
    return sum(len(text.heldout) for text in corpus.texts)


def evaluate(weights: Weights, corpus: Corpus, num_tokens: int, device: str) -> Evaluation:
    """The loss on the first `num_tokens` held-out tokens (rounded up to sequences, as far as there are)."""
    # A text that is shorter than a sequence is one by itself.
    seq_len = min(weights.seq_len, *(len(text.heldout) - 1 for text in corpus.texts))
    micro_batch = max(1, MICRO_BATCH_TOKENS // seq_len)
    windows = heldout_windows(corpus, seq_len, num_tokens, 0, 1, micro_batch)
    eos_id = corpus.eos_id if weights.run is not None and weights.run.data.document_mask else None
    model = build_model(weights.sizes, weights.tensors, seq_len, device)
    loss_sum, tokens = summed_loss(model, windows, seq_len, eos_id)
    loss = loss_sum / tokens
    return Evaluation(loss, bits_per_byte(loss, corpus), tokens)


@dataclass(frozen=True)
class Wanted:
    """What text is asked for."""

    prompt: str
    max_tokens: int
    sampling: Sampling
    seed: int


def write_text(weights: Weights, wanted: Wanted, count: int, device: str) -> Iterator[Iterator[str]]:
    """`count` texts, each in pieces as they come; text k is the one that seed + k gives alone."""
    tokenizer = build_tokenizer(weights.tokenizer)
    prompt = prompt_ids(tokenizer, wanted.prompt)
    model = build_model(weights.sizes, weights.tensors, len(prompt) + wanted.max_tokens, device)
    for number in range(count):
        generator = torch.Generator().manual_seed(wanted.seed + number)
        ids = generate(model, prompt, wanted.max_tokens, wanted.sampling, generator)
        yield pieces_of_text(ids, tokenizer)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The prompt's ids behind an eos: in training that is what a document begins after."""
    return [tokenizer.eos_id, *map(int, tokenizer.encode(prompt))]
