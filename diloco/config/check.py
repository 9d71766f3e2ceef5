"""What can be found wrong with a run before any process starts. No torch here."""

from pathlib import Path

from diloco.config import Config, ConfigError, IslandConfig, RunConfig
from diloco.planning.specs import specs_of
from inner.data.bigram import bigram_loss
from inner.data.corpus import Corpus, check_source, prepare_corpus
from inner.mesh import accumulation, resolve_degrees
from inner.parallel.check import check_layout
from inner.presets import BYTE_VOCAB_SIZE, num_params, resolve_sizes
from outer.errors import InputError
from outer.fragments import fragments_of

BIGRAM_VOCAB = 1024


def check_island(run: RunConfig, island: IslandConfig, where: str) -> None:
    """Raise ConfigError or InputError, naming the island, if its mesh or micro-batch cannot train this run."""
    try:
        degrees = resolve_degrees(island.mesh, island.ranks)
        tokens, seq_len = run.optimizer.tokens_per_step, run.data.seq_len
        num_micro_batches = accumulation(tokens, seq_len, island.micro_batch, degrees.num_data_ranks)
        # The tokenizer, which has not been read yet, gives the vocabulary; any will do here.
        sizes = resolve_sizes(run.model, run.model.vocab_size or BYTE_VOCAB_SIZE)
        check_layout(sizes, degrees, island.parallel, seq_len, num_micro_batches)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_fragments(run: RunConfig) -> None:
    """Raise ConfigError if the model has too few layers for the run's fragments."""
    try:
        fragments_of(specs_of(resolve_sizes(run.model, run.model.vocab_size or BYTE_VOCAB_SIZE)), run.outer)
    except InputError as error:
        raise ConfigError(str(error)) from None


def check_names(config: Config, num_islands: int) -> None:
    """Raise ConfigError if two islands have one name: they would be one to the others, with one folder."""
    names = [config.for_island(index).island for index in range(num_islands)]
    for index, name in enumerate(names):
        if (first := names.index(name)) != index:
            raise ConfigError(
                f"islands[{index}].name: {name!r} is the name of islands[{first}], too; each needs a name, and so a "
                "folder, of its own: leave it out to have them called island-0, island-1, ..."
            )


def check_run(config: Config, num_islands: int) -> Corpus:
    """The prepared corpus, after everything that this machine can check has been checked."""
    run = config.run
    for index in range(num_islands):
        check_island(run, config.for_island(index), f"island {index}")
    check_names(config, num_islands)
    check_fragments(run)
    island = config.for_island(0)
    check_source(run.data)
    corpus = prepare_corpus(run.data, Path(island.cache_dir).expanduser())
    resolve_sizes(run.model, corpus.vocab_size)
    return corpus


def model_params(run: RunConfig, corpus: Corpus) -> int:
    """Parameters of the run's model."""
    return num_params(resolve_sizes(run.model, corpus.vocab_size))


def bigram_yardstick(corpus: Corpus) -> float | None:
    """Held-out loss of a byte bigram model, nats a token; None for mixtures, and where it would say nothing."""
    text, *others = corpus.texts
    if corpus.vocab_size > BIGRAM_VOCAB or others:
        return None
    return bigram_loss(text.train, text.heldout, corpus.vocab_size)
