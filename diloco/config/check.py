"""Checks of a run's config before any process starts. Importing this does not import torch."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from diloco.config.schema import Config, IslandConfig, RunConfig
from diloco.errors import ConfigError
from inner.data.bigram import bigram_loss
from inner.data.corpus import Corpus, check_source, prepare_corpus
from inner.import_path import is_import_path
from inner.measure.param_specs import num_elements, param_specs
from inner.mesh import accumulation_steps, resolve_degrees
from inner.model.sizes import BYTE_VOCAB_SIZE, OwnModel, resolve_model
from inner.parallel.layout_check import check_layout
from inner.param_spec import ParamSpec
from outer.space.fragments import assign_fragments

MAX_BIGRAM_VOCAB = 1024


def check_island(run: RunConfig, island: IslandConfig, where: str) -> None:
    """Raise ConfigError if the island's mesh or micro-batch cannot train this run. `where` names it in the error."""
    check_trainer(run)
    check_extras(island, where)
    try:
        degrees = resolve_degrees(island.mesh, island.ranks)
        tokens, seq_len = run.optimizer.tokens_per_step, run.data.seq_len
        num_micro_batches = accumulation_steps(tokens, seq_len, island.micro_batch, degrees.num_data_ranks)
        # The vocabulary's size comes from the tokenizer, which is not loaded yet. Any size serves for these checks.
        model = resolve_model(run.model, run.model.vocab_size or BYTE_VOCAB_SIZE)
        if isinstance(model, OwnModel):
            from inner.parallel.own_model import check_own_model

            masks_documents = run.data.document_mask
            check_own_model(model, degrees, island.parallel, seq_len, masks_documents=masks_documents)
        else:
            check_layout(model, degrees, island.parallel, seq_len, num_micro_batches)
        if is_import_path(run.optimizer.name):
            from inner.optim.own_optimizer import check_own_optimizer

            check_own_optimizer(run.optimizer, degrees)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def check_trainer(run: RunConfig) -> None:
    """Raise ConfigError if the run is trained by loops of their own, of which only the parameters are known here."""
    if run.params:
        raise ConfigError(
            f"the run {run.name!r} is trained by its own program with diloco.Islands ({run.params}), and that model "
            "is not known here: start that program, with island.bootstrap=[ADDRESS] and island.joins=true"
        )


def check_extras(island: IslandConfig, where: str) -> None:
    """Raise ConfigError if the island logs to a package that is not installed, because it is an extra."""
    chosen = {"wandb": island.wandb != "off", "tensorboard": island.tensorboard}
    for extra in (name for name, is_chosen in chosen.items() if is_chosen and find_spec(name) is None):
        cure = f"pip install {extra} (or 'diloco[{extra}]'), or leave the setting out"
        raise ConfigError(f"{where}: island.{extra} is set, and the package {extra} is not installed; {cure}")


def check_fragments(run: RunConfig) -> None:
    """Raise ConfigError if the model has too few layers for the run's fragments."""
    try:
        assign_fragments(model_specs(run, run.model.vocab_size or BYTE_VOCAB_SIZE), run.outer)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_names(config: Config, num_islands: int) -> None:
    """Raise ConfigError if two islands have the same name and so the same identity and folder."""
    names = [config.for_island(index).label for index in range(num_islands)]
    for index, name in enumerate(names):
        if (first := names.index(name)) != index:
            raise ConfigError(
                f"islands[{index}].name: {name!r} is the name of islands[{first}], too; each island needs a name, and "
                "so a folder, of its own: leave the names out to use island-0, island-1, ..."
            )


def check_run(config: Config, num_islands: int) -> Corpus:
    """Check all that this machine can check of the run, and return the prepared corpus. Raises ConfigError."""
    run = config.run
    for index in range(num_islands):
        check_island(run, config.for_island(index), f"island {index}")
    check_names(config, num_islands)
    check_fragments(run)
    island = config.for_island(0)
    check_source(run.data)
    corpus = prepare_corpus(run.data, Path(island.cache_dir).expanduser())
    resolve_model(run.model, corpus.vocab_size)
    return corpus


def count_params(run: RunConfig, corpus: Corpus) -> int:
    """Number of parameters of the run's model."""
    return num_elements(model_specs(run, corpus.vocab_size))


def model_specs(run: RunConfig, vocab_size: int) -> Sequence[ParamSpec]:
    """Name and shape of every parameter of the run's model, ours or an own one. Raises InputError if it is wrong."""
    model = resolve_model(run.model, vocab_size)
    if isinstance(model, OwnModel):
        from inner.parallel.own_model import own_param_specs

        return own_param_specs(model, run.data.seq_len)
    return param_specs(model)


def bigram_baseline(corpus: Corpus) -> float | None:
    """Held-out loss of a bigram model, in nats per token; None for mixtures, large vocabularies and conversations."""
    text, *others = corpus.texts
    if corpus.vocab_size > MAX_BIGRAM_VOCAB or others or text.is_coded:
        return None
    return bigram_loss(text.train, text.heldout, corpus.vocab_size)
