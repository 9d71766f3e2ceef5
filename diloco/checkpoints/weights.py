"""Load a trained model from a run or from an exported folder, evaluate it, and generate text with
it.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from diloco.checkpoints.signing import SignatureOptions
from diloco.config.own_code import check_allowed, own_code
from diloco.config.schema import IslandConfig, RunConfig, longest_sequence, parse_config
from diloco.runtime.corpus import load_corpus
from diloco.runtime.evaluation import bits_per_byte
from inner.config import DataConfig
from inner.data.batches import heldout_windows
from inner.data.chat.templates import END_MARKERS
from inner.data.corpus import Corpus, Text
from inner.data.sources.build import build_source
from inner.data.tokenise import encode_document
from inner.data.tokenizer import Tokenizer, build_tokenizer
from inner.data.vocabulary.ends import read_beside, token_name
from inner.errors import InputError
from inner.expert_names import router_bias_name
from inner.files import home_path
from inner.huggingface.load import read_whole
from inner.huggingface.model_config import (
    CONFIG,
    read_config,
    read_length,
    read_model_config,
    read_special_ids,
)
from inner.huggingface.save import Dtype, Export
from inner.huggingface.tokenizer_files import TOKENIZER
from inner.measure.param_specs import param_specs
from inner.model.generate import Sampling, generate, pieces_of_text, until
from inner.model.single_process import build_whole_model, summed_loss
from inner.model.sizes import ModelSizes, resolve_sizes

log = logging.getLogger(__name__)

RUN_CONFIG = "config.yaml"
MICRO_BATCH_TOKENS = 4096
UNSET = SignatureOptions()


@dataclass(frozen=True)
class Weights:
    """A trained model. `tensors` are the unsharded fp32 parameters by full name, and the biases of
    routers.
    """

    sizes: ModelSizes
    tensors: dict[str, Tensor]
    seq_len: int
    """Longest sequence that the model is meant for, by its training or by its initial model."""
    tokenizer: str
    """A value of data.tokenizer."""
    run: RunConfig | None = None
    """Config of the run that has these global params; None for an exported folder."""
    island: IslandConfig | None = None
    """Config of the run's first island, which names the place of the text."""
    eos: str | None = None
    bos: str | None = None
    """Values of data.eos and data.bos."""
    bos_id: int | None = None
    """Id that begins a text when the model is used; None if the tokenizer decides."""
    stop_ids: tuple[int, ...] = ()
    """Ids besides eos with which the model ends a text."""

    @property
    def window(self) -> int:
        """Default tokens per window when a text is evaluated."""
        return min(self.seq_len, MICRO_BATCH_TOKENS) if self.run is None else self.run.data.seq_len

    @property
    def stop_text(self) -> str | None:
        """Text that ends a message, if the model was trained on conversations.

        None for other models, and if the tokenizer has a token for the end of a message.
        """
        template = None if self.run is None else chat_end(self.run.data)
        return None if self.stop_ids else template

    def check_length(self, num_tokens: int) -> None:
        """Raise InputError if `num_tokens` are more than the learned positions of the model."""
        limit = self.sizes.decoder.max_positions
        if limit is not None and num_tokens > limit:
            raise InputError(
                f"the model has learned {limit} positions (model.decoder.max_positions), and a "
                f"sequence has {num_tokens} tokens; ask for no more than {limit} (--seq-len; "
                "--max-tokens with the prompt)"
            )

    def encoder(self) -> Tokenizer:
        """Build the tokenizer. Raises InputError."""
        return build_tokenizer(self.tokenizer, self.eos, self.bos)

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a text to continue, begun as documents were in training.

        Raises InputError.
        """
        tokenizer = self.encoder()
        # Without a bos, each document follows the eos of another one.
        first = tokenizer.eos_id if tokenizer.first_id is None else tokenizer.first_id
        return [first, *map(int, tokenizer.encode(text))]

    def export(self, dtype: Dtype = "float32") -> Export:
        """Return the description with which these weights are exported."""
        told = {"eos": self.eos, "bos": self.bos, "bos_id": self.bos_id, "eos_ids": self.stop_ids}
        return Export(self.sizes, self.seq_len, self.tokenizer, dtype, **told)


@dataclass(frozen=True)
class Evaluation:
    """The loss of a model on a text."""

    loss: float
    """Nats per token."""
    bits_per_byte: float
    tokens: int


def open_weights(
    path: Path, island: str | None = None, signatures: SignatureOptions = UNSET
) -> Weights:
    """Load the weights of an exported folder, or the global params of a run from its folder or from
    one checkpoint.

    `island` names the island whose checkpoint to read; None takes the one with the latest round.
    Raises InputError.
    """
    if (path / CONFIG).is_file():
        return _open_export(path)
    if not path.is_dir():
        raise InputError(
            f"{path}: no such folder; give a run's folder, a checkpoint, or an exported model"
        )
    # Imported here because only the checkpoints of a run need torch.distributed.checkpoint.
    from diloco.checkpoints.global_params import find_run_folder, read_global_params

    config = find_run_folder(path) / RUN_CONFIG
    own = (
        parse_config(config.read_text(), where=str(config)).for_island(0)
        if config.is_file()
        else None
    )
    run, tensors = read_global_params(path, island, signatures.build_signer(own))
    return weights_of_run(run, own, tensors, path)


def weights_of_run(
    run: RunConfig, own: IslandConfig | None, tensors: dict[str, Tensor], path: Path
) -> Weights:
    """Return the weights of a run. Raises InputError.

    `own`: the config of an island, which names the places of the text and of the first weights.
    """
    tokenizer = (own.tokenizer if own is not None else None) or run.data.tokenizer
    encoder = build_tokenizer(tokenizer, run.data.eos, run.data.bos)
    sizes = resolve_sizes(run.model, encoder.vocab_size)
    expected = {spec.name: spec.shape for spec in param_specs(sizes)}
    if sizes.experts is not None:
        expected |= {
            router_bias_name(layer): (sizes.experts.number,) for layer in sizes.expert_layers
        }
    if expected != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise InputError(
            f"{path}: the parameters in its checkpoint differ from the model in its config"
        )
    bos_id, seq_len = _of_beginning(run, own, encoder)
    ends = (run.data.eos, run.data.bos)
    return Weights(
        sizes, tensors, seq_len, tokenizer, run, own, *ends, bos_id, _stop_ids(run.data, encoder)
    )


def chat_end(data: DataConfig) -> str | None:
    """Return the marker that ends a message in the run's first source of conversations.

    None if none is.
    """
    return next(
        (END_MARKERS[each.chat_template] for each in data.sources if each.format == "chat"), None
    )


def _stop_ids(data: DataConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids with which the model ends a text: the end of a message, and eos.

    Empty for eos alone.
    """
    marker = chat_end(data)
    end = None if marker is None else tokenizer.token_id(marker)
    return () if end is None else tuple(dict.fromkeys((end, tokenizer.eos_id)))


def _of_beginning(
    run: RunConfig, island: IslandConfig | None, tokenizer: Tokenizer
) -> tuple[int | None, int]:
    """Return (bos id or None, longest sequence), considering the model that the run began from."""
    seq_len = longest_sequence(run)
    named = run.model.init_from
    if named is None:
        return tokenizer.first_id, seq_len
    folder = home_path(
        (island.init_from if island is not None else None) or named, "model.init_from"
    )
    try:
        config = read_config(folder)
    except InputError as error:
        log.warning(
            "%s; the sequence length of the training, %d, and the tokenizer's bos are used instead",
            error,
            seq_len,
        )
        return tokenizer.first_id, seq_len
    bos_id, _ = read_special_ids(config, tokenizer.vocab_size)
    return bos_id if tokenizer.first_id is None else tokenizer.first_id, max(
        seq_len, read_length(folder, config)
    )


def _open_export(folder: Path) -> Weights:
    config = read_config(folder)
    sizes = resolve_sizes(read_model_config(folder), 0)
    bos_id, stop_ids = read_special_ids(config, sizes.vocab_size)
    told = read_beside(folder)
    # Otherwise texts do not begin with bos: some models name a bos that their training did not use.
    bos = token_name(told, "bos_token") if told.get("add_bos_token") is True else None
    return Weights(
        sizes,
        read_whole(folder, param_specs(sizes), sizes),
        read_length(folder, config),
        str(folder / TOKENIZER),
        bos=bos,
        bos_id=bos_id,
        stop_ids=stop_ids,
    )


def load_heldout_text(weights: Weights, allow_imports: Sequence[str] = ()) -> Corpus:
    """Return the held-out text of the run.

    Raises InputError for an exported folder, which has none. The run may be somebody else's: raises
    ConfigError if its text comes from own code that `allow_imports` does not name.
    """
    if weights.run is None or weights.island is None:
        raise InputError(
            "an exported folder has no held-out text of its own; name files or folders of text"
        )
    sources = [(key, path) for key, path in own_code(weights.run) if key.startswith("data")]
    check_allowed(sources, tuple(allow_imports), "add --allow-import ")
    return load_corpus(weights.run, weights.island)


def load_text(paths: Sequence[str], weights: Weights, num_tokens: int | None) -> Corpus:
    """Return all text of files and folders as held-out text.

    It ends with the document that exceeds `num_tokens`.
    """
    field = DataConfig().text_field if weights.run is None else weights.run.data.text_field
    tokenizer = weights.encoder()
    pieces: list[np.ndarray] = []
    total_tokens = total_bytes = 0
    for document in build_source(
        DataConfig(source="files", paths=list(paths), text_field=field)
    ).documents():
        pieces.append(encode_document(tokenizer, document.text))
        total_tokens += len(pieces[-1])
        total_bytes += len(document.text.encode("utf-8", "replace"))
        if num_tokens is not None and total_tokens > num_tokens:
            break
    text = Text(np.empty(0, dtype=np.uint32), np.concatenate(pieces), total_bytes)
    return Corpus((text,), tokenizer.vocab_size, tokenizer.eos_id)


def evaluate(
    weights: Weights,
    corpus: Corpus,
    num_tokens: int | None,
    device: str,
    seq_len: int | None = None,
) -> Evaluation:
    """Return the loss on the first `num_tokens` held-out tokens, rounded up to whole sequences.

    None, or more tokens than there are, means all. `seq_len`: tokens per sequence; None means
    `weights.window`.
    """
    num_tokens = num_tokens or sum(len(text.heldout) for text in corpus.texts)
    # A text shorter than a sequence is used as one shorter sequence.
    seq_len = min(seq_len or weights.window, *(len(text.heldout) - 1 for text in corpus.texts))
    weights.check_length(seq_len)
    micro_batch = max(1, MICRO_BATCH_TOKENS // seq_len)
    windows = heldout_windows(corpus, seq_len, num_tokens, 0, 1, micro_batch)
    eos_id = corpus.eos_id if weights.run is not None and weights.run.data.document_mask else None
    model = build_whole_model(weights.sizes, weights.tensors, seq_len, device)
    loss_sum, tokens = summed_loss(model, windows, seq_len, eos_id)
    if not tokens:
        raise InputError(
            "the text has nothing that the model learns to write, so it has no loss; give more text"
        )
    loss = loss_sum / tokens
    return Evaluation(loss, bits_per_byte(loss, corpus), tokens)


@dataclass(frozen=True)
class GenerateRequest:
    """How to generate a text."""

    prompt: str
    max_tokens: int
    sampling: Sampling
    seed: int


def generate_texts(
    weights: Weights, request: GenerateRequest, count: int, device: str
) -> Iterator[Iterator[str]]:
    """Generate `count` texts, each in pieces as they are sampled. Text k uses `request.seed` +
    k.
    """
    tokenizer = weights.encoder()
    prompt = weights.prompt(request.prompt)
    weights.check_length(len(prompt) + request.max_tokens)
    model = build_whole_model(
        weights.sizes, weights.tensors, len(prompt) + request.max_tokens, device
    )
    for number in range(count):
        generator = torch.Generator().manual_seed(request.seed + number)
        ids = generate(model, prompt, request.max_tokens, request.sampling, generator)
        pieces = pieces_of_text(ids, tokenizer, weights.stop_ids)
        yield pieces if weights.stop_text is None else until(pieces, weights.stop_text)
