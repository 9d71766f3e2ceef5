"""Load a trained model from a run or from an exported folder, evaluate it, and generate text with it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diloco.checkpoints.signing import SignatureOptions
from diloco.config.own_code import check_allowed, own_code
from diloco.config.schema import IslandConfig, RunConfig, parse_config
from diloco.runtime.corpus import load_corpus
from diloco.runtime.step_records import bits_per_byte
from inner.config import DataConfig
from inner.data.batches import heldout_windows
from inner.data.corpus import Corpus, Text
from inner.data.sources.build import build_source
from inner.data.tokenizer import build_tokenizer
from inner.errors import InputError
from inner.huggingface.load import read_whole
from inner.huggingface.model_config import CONFIG, read_config, read_model_config
from inner.huggingface.tokenizer_files import TOKENIZER
from inner.measure.param_specs import param_specs
from inner.model.generate import Sampling, generate, pieces_of_text
from inner.model.single_process import build_whole_model, summed_loss
from inner.model.sizes import ModelSizes, resolve_sizes

RUN_CONFIG = "config.yaml"
MICRO_BATCH_TOKENS = 4096
UNSET = SignatureOptions()


@dataclass(frozen=True)
class Weights:
    """A trained model. `tensors` are the unsharded fp32 parameters by full name."""

    sizes: ModelSizes
    tensors: dict[str, Tensor]
    seq_len: int
    """Length of the sequences that the model was trained on."""
    tokenizer: str
    """A value of data.tokenizer."""
    run: RunConfig | None = None
    """Config of the run whose global params these are; None for the weights of an exported folder."""
    island: IslandConfig | None = None
    """Config of the run's first island, which says where the text is."""


@dataclass(frozen=True)
class Evaluation:
    """The loss of a model on a text."""

    loss: float
    """Nats per token."""
    bits_per_byte: float
    tokens: int


def open_weights(path: Path, island: str | None = None, signatures: SignatureOptions = UNSET) -> Weights:
    """Load the weights of an exported folder, or the global params of a run from its folder or from one checkpoint.

    `island` names the island whose checkpoint to read; None takes the one with the latest round. Raises InputError.
    """
    if (path / CONFIG).is_file():
        return _open_export(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; give a run's folder, a checkpoint, or an exported model")
    # Imported here because only the checkpoints of a run need torch.distributed.checkpoint.
    from diloco.checkpoints.global_params import find_run_folder, read_global_params

    config = find_run_folder(path) / RUN_CONFIG
    own = parse_config(config.read_text(), where=str(config)).for_island(0) if config.is_file() else None
    run, tensors = read_global_params(path, island, signatures.build_signer(own))
    tokenizer = (own.tokenizer if own is not None else None) or run.data.tokenizer
    sizes = resolve_sizes(run.model, build_tokenizer(tokenizer).vocab_size)
    if {spec.name: spec.shape for spec in param_specs(sizes)} != {k: tuple(v.shape) for k, v in tensors.items()}:
        raise InputError(f"{path}: the parameters in its checkpoint are not those of the model in its config")
    return Weights(sizes, tensors, run.data.seq_len, tokenizer, run, own)


def _open_export(folder: Path) -> Weights:
    sizes = resolve_sizes(read_model_config(folder), 0)
    seq_len = read_config(folder).get("max_position_embeddings")
    if not isinstance(seq_len, int) or seq_len < 1:
        raise InputError(f"{folder / CONFIG}: max_position_embeddings is {seq_len!r}; allowed: a number of tokens")
    return Weights(sizes, read_whole(folder, param_specs(sizes)), seq_len, str(folder / TOKENIZER))


def load_heldout_text(weights: Weights, allow_imports: Sequence[str] = ()) -> Corpus:
    """The held-out text of the run. Raises InputError for an exported folder, which has none.

    The run may be somebody else's: ConfigError if its text comes from own code that `allow_imports` does not name.
    """
    if weights.run is None or weights.island is None:
        raise InputError("an exported folder has no held-out text of its own; name files or folders of text")
    sources = [(key, path) for key, path in own_code(weights.run) if key.startswith("data")]
    check_allowed(sources, tuple(allow_imports), "add --allow-import ")
    return load_corpus(weights.run, weights.island)


def load_text(paths: Sequence[str], weights: Weights, num_tokens: int | None) -> Corpus:
    """All text of files and folders, as held-out text; stops after the document that exceeds `num_tokens`."""
    field = DataConfig().text_field if weights.run is None else weights.run.data.text_field
    tokenizer = build_tokenizer(weights.tokenizer)
    pieces: list[np.ndarray] = []
    total_tokens = total_bytes = 0
    for document in build_source(DataConfig(source="files", paths=list(paths), text_field=field)).documents():
        pieces.append(np.append(tokenizer.encode(document.text), np.uint32(tokenizer.eos_id)))
        total_tokens += len(pieces[-1])
        total_bytes += len(document.text.encode("utf-8", "replace"))
        if num_tokens is not None and total_tokens > num_tokens:
            break
    text = Text(np.empty(0, dtype=np.uint32), np.concatenate(pieces), total_bytes)
    return Corpus((text,), tokenizer.vocab_size, tokenizer.eos_id)


def evaluate(weights: Weights, corpus: Corpus, num_tokens: int | None, device: str) -> Evaluation:
    """The loss on the first `num_tokens` held-out tokens, rounded up to whole sequences; None or too many mean all."""
    num_tokens = num_tokens or sum(len(text.heldout) for text in corpus.texts)
    # A text shorter than a sequence is used as one shorter sequence.
    seq_len = min(weights.seq_len, *(len(text.heldout) - 1 for text in corpus.texts))
    micro_batch = max(1, MICRO_BATCH_TOKENS // seq_len)
    windows = heldout_windows(corpus, seq_len, num_tokens, 0, 1, micro_batch)
    eos_id = corpus.eos_id if weights.run is not None and weights.run.data.document_mask else None
    model = build_whole_model(weights.sizes, weights.tensors, seq_len, device)
    loss_sum, tokens = summed_loss(model, windows, seq_len, eos_id)
    loss = loss_sum / tokens
    return Evaluation(loss, bits_per_byte(loss, corpus), tokens)


@dataclass(frozen=True)
class GenerateRequest:
    """How to generate a text."""

    prompt: str
    max_tokens: int
    sampling: Sampling
    seed: int


def generate_texts(weights: Weights, request: GenerateRequest, count: int, device: str) -> Iterator[Iterator[str]]:
    """Generate `count` texts, each in pieces as they are sampled. Text k uses `request.seed` + k."""
    tokenizer = build_tokenizer(weights.tokenizer)
    # An eos token precedes every document in training.
    prompt = [tokenizer.eos_id, *map(int, tokenizer.encode(request.prompt))]
    model = build_whole_model(weights.sizes, weights.tensors, len(prompt) + request.max_tokens, device)
    for number in range(count):
        generator = torch.Generator().manual_seed(request.seed + number)
        ids = generate(model, prompt, request.max_tokens, request.sampling, generator)
        yield pieces_of_text(ids, tokenizer)
