"""Check a run's config before any process starts. Importing this does not import torch."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import product
from typing import get_args

from diloco.config.schema import Config, IslandConfig, RunConfig, at_stage
from diloco.errors import ConfigError
from inner.config import Recompute
from inner.data.corpus import Corpus, check_source, prepare_corpus, without_texts
from inner.data.mixture import StreamedTokens
from inner.data.streaming.open import is_streamed
from inner.errors import InputError
from inner.files import make_folder
from inner.import_path import is_import_path
from inner.measure.bigram import bigram_loss
from inner.measure.param_specs import num_elements, param_specs
from inner.mesh import accumulation_steps, resolve_degrees
from inner.model.sizes import BYTE_VOCAB_SIZE, OwnModel, resolve_model
from inner.parallel.layout_check import check_layout
from inner.param_spec import ParamSpec
from outer.packages import MEET_ELSEWHERE, require_hivemind
from outer.space.fragments import assign_fragments, build_claims

MAX_BIGRAM_VOCAB = 1024
AUTO_TP = (1, 2, 4, 8)
"""Most ranks per layer among which `island.auto` chooses. More ranks span several nodes, where
tensor parallelism is slow."""
AUTO_MICRO_BATCH = (256, 128, 64, 32, 16, 8, 4, 2, 1)


def check_island(run: RunConfig, island: IslandConfig, where: str) -> None:
    """Raise ConfigError if the island's mesh or micro-batch cannot train this run. `where` names it
    in the error.
    """
    check_trainer(run)
    if island.masters:
        raise ConfigError(
            f"{where}: island.masters is true, which is for training loops of your own with "
            "diloco.Islands; take it "
            "out: the weights of `diloco train` are fp32"
        )
    check_extras(island, where)
    try:
        run.data.of_island(island.label)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not run.stages:
        check_mesh(run, island, where)
    for stage in range(len(run.stages)):
        check_mesh(at_stage(run, stage), island, f"{where}, stages[{stage}]")


def check_network(run: RunConfig, island: IslandConfig) -> None:
    """Raise InputError if the island's connection to other islands needs an optional package that
    is not installed.
    """
    if run.outer.network.has_daemon:
        require_hivemind(f"outer.transport={run.outer.transport}")
    if any(address.startswith("/") for address in island.bootstrap):
        require_hivemind("the DHT at the addresses in island.bootstrap", MEET_ELSEWHERE)


def check_entry(run: RunConfig, island: IslandConfig) -> None:
    """Raise ConfigError if an island in a separate process would wait for ever, or has no usable
    folder for its runs.
    """
    check_company(run, island)
    check_run_dir(run, island)


def check_company(run: RunConfig, island: IslandConfig) -> None:
    """Raise ConfigError if the island would wait for other islands that cannot find it."""
    others = run.outer.start_islands - 1
    if others == 0 and not island.joins:
        return
    why = (
        "island.joins is true"
        if island.joins
        else f"{others} more begin with it (outer.start_islands)"
    )
    alone = "" if island.joins else ", or set outer.start_islands=1 to train alone"
    if not run.outer.network.leaves_process:
        raise ConfigError(
            f"outer.transport: got {run.outer.transport}, which no other process reaches, and "
            f"{why}: {island.label} would wait for ever; use tls, gloo or hivemind{alone}"
        )
    if not island.bootstrap:
        raise ConfigError(
            f"island.bootstrap: got no address, and {why}: {island.label} would wait for ever; "
            "start `diloco "
            f"bootstrap` and give the address that it prints, island.bootstrap=[ADDRESS]{alone}"
        )


def check_run_dir(run: RunConfig, island: IslandConfig) -> None:
    """Create the folder of the island's runs. Raises ConfigError if it cannot be created or written
    to.

    It does not raise if the run has begun already, because then the run continues without records:
    the disk may have become read-only since.
    """
    if (island.runs / run.name).exists():
        return
    try:
        make_folder(island.runs, "island.run_dir")
    except InputError as error:
        raise ConfigError(str(error)) from None


def check_index(config: Config, index: int) -> None:
    """Raise ConfigError if `islands` has entries but none for this index, unless the island joins a
    run.
    """
    count = len(config.islands)
    if count and index >= count and not config.for_island(index).joins:
        raise ConfigError(
            f"island.index: got {index}, and `islands` has the entries 0 to {count - 1}; choose "
            "one of them, add an "
            "entry, or set island.joins=true to join a run that others have begun"
        )


def check_mesh(run: RunConfig, island: IslandConfig, where: str) -> None:
    """Raise ConfigError if the island's mesh or micro-batch does not fit a run without stages, or
    one stage of a run.
    """
    try:
        list_candidates(run, island)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def list_candidates(run: RunConfig, island: IslandConfig) -> list[IslandConfig]:
    """Return the island with each choice of settings that `island.auto` allows; without it only the
    island itself.

    Candidates with fewer ranks per layer come first, then with less recomputation, then with larger
    micro-batches. So the last one needs the least memory. Raises InputError or ConfigError if no
    candidate can train the run.
    """
    if not island.auto:
        check_step(run, island)
        return [island]
    if run.model.name is not None:
        raise ConfigError(
            "island.auto plans memory, which is not possible for an own model; set the settings "
            "yourself"
        )
    candidates = []
    refusal = ValueError("nothing to choose from")
    for each in _combine(run, island):
        try:
            check_step(run, each)
            candidates.append(each)
        except ValueError as error:
            refusal = error
    if not candidates:
        raise ConfigError(
            f"island.auto={list(island.auto)} finds no setting that can train this run; one was: "
            f"{refusal}"
        )
    return candidates


def _combine(run: RunConfig, island: IslandConfig) -> Iterator[IslandConfig]:
    """Yield all combinations of the settings that `island.auto` names, in the order of
    list_candidates.
    """
    sequences = run.optimizer.tokens_per_step // run.data.seq_len
    meshes = [island.mesh]
    kinds = [island.parallel.recompute]
    sizes = [island.micro_batch]
    if "mesh" in island.auto:
        degrees = [n for n in AUTO_TP if island.ranks % n == 0]
        meshes = [island.mesh.model_copy(update={"dp_shard": -1, "tp": tp}) for tp in degrees]
    if "recompute" in island.auto:
        kinds = list(get_args(Recompute))
    if "micro_batch" in island.auto:
        sizes = [n for n in AUTO_MICRO_BATCH if sequences % n == 0]
    for mesh, recompute, micro_batch in product(meshes, kinds, sizes):
        parallel = island.parallel.model_copy(update={"recompute": recompute})
        changes = {"mesh": mesh, "parallel": parallel, "micro_batch": micro_batch, "auto": ()}
        yield island.model_copy(update=changes)


def check_step(run: RunConfig, island: IslandConfig) -> None:
    """Raise InputError if the island's mesh, micro-batch and similar settings cannot make an inner
    step of this run.
    """
    degrees = resolve_degrees(island.mesh, island.ranks)
    tokens = run.optimizer.tokens_per_step
    seq_len = run.data.seq_len
    num_micro_batches = accumulation_steps(
        tokens, seq_len, island.micro_batch, degrees.num_data_ranks
    )
    # The vocabulary's size comes from the tokenizer, which is not loaded yet. Any size works for
    # these checks.
    model = resolve_model(run.model, run.model.vocab_size or BYTE_VOCAB_SIZE)
    if isinstance(model, OwnModel):
        from inner.parallel.own_model import check_own_model

        masks_documents = run.data.document_mask
        check_own_model(model, degrees, island.parallel, seq_len, masks_documents=masks_documents)
    else:
        check_layout(model, degrees, island.parallel, seq_len, num_micro_batches)
    check_stability(run, is_own=isinstance(model, OwnModel))
    if is_import_path(run.optimizer.name):
        from inner.optim.own_optimizer import check_own_optimizer

        check_own_optimizer(run.optimizer, degrees)


def check_stability(run: RunConfig, *, is_own: bool) -> None:
    """Raise InputError if the settings for spikes, z-loss or noise scale do not fit the rest of the
    run.
    """
    optimizer = run.optimizer
    outer = run.outer
    if optimizer.z_loss and is_own:
        raise InputError(
            "optimizer.z_loss: the loss of an own model is computed from its logits alone; set it "
            "to 0"
        )
    if optimizer.dropout and is_own:
        raise InputError(
            f"optimizer.dropout: got {optimizer.dropout:g}, and only the built-in decoder has "
            "dropout; set it to 0, and use a dropout in the own model"
        )
    if optimizer.noise_scale_every and optimizer.tokens_per_step < 2 * run.data.seq_len:
        raise InputError(
            "optimizer.noise_scale_every needs two sequences in a step, and "
            "optimizer.tokens_per_step is "
            f"{optimizer.tokens_per_step}, data.seq_len {run.data.seq_len}; set it to 0, or make "
            "steps larger"
        )
    waits = outer.wait_for == "all" and outer.delay == 0 and outer.gossip is None
    if optimizer.spikes.action == "rewind" and not waits:
        raise InputError(
            "optimizer.spikes.action: rewind goes back to the params of the last commit, for which "
            "no round may be in flight; set action to skip, or outer.delay to 0, outer.wait_for to "
            "all and outer.gossip to null"
        )


def check_trainer(run: RunConfig) -> None:
    """Raise ConfigError if the run is trained by its own training loops, whose model is not known
    here.
    """
    if run.params:
        raise ConfigError(
            f"the run {run.name!r} is trained by its own program with diloco.Islands "
            f"({run.params}), and that model "
            "is not known here: start that program, with island.bootstrap=[ADDRESS] and "
            "island.joins=true"
        )


def check_extras(island: IslandConfig, where: str) -> None:
    """Raise ConfigError if the island logs to an optional package that is not installed."""
    chosen = {"wandb": island.wandb != "off", "tensorboard": island.tensorboard}
    for extra in (
        name for name, is_chosen in chosen.items() if is_chosen and find_spec(name) is None
    ):
        cure = f"pip install {extra} (or 'diloco[{extra}]'), or leave the setting out"
        raise ConfigError(
            f"{where}: island.{extra} is set, and the package {extra} is not installed; {cure}"
        )


def check_fragments(run: RunConfig) -> None:
    """Raise ConfigError if the model has too few layers for the run's fragments, or no experts for
    settings of experts.
    """
    try:
        specs = model_specs(run, run.model.vocab_size or BYTE_VOCAB_SIZE)
        assign_fragments(specs, run.outer)
        build_claims(specs, run.outer, count_experts_per_token(run))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def count_experts_per_token(run: RunConfig) -> int:
    """Return the number of experts that each token chooses in a layer; 0 if no router of ours
    counts them: for dense models, own models and own loops.
    """
    if run.params or run.model.name is not None:
        return 0
    model = resolve_model(run.model, run.model.vocab_size or BYTE_VOCAB_SIZE)
    assert not isinstance(model, OwnModel), "own models have a name"
    return 0 if model.experts is None else model.experts.per_token


def check_names(config: Config, num_islands: int) -> None:
    """Raise ConfigError if two islands have the same name, because they would have the same
    identity and folder.
    """
    names = [config.for_island(index).label for index in range(num_islands)]
    for index, name in enumerate(names):
        if (first := names.index(name)) != index:
            raise ConfigError(
                f"islands[{index}].name: {name!r} is the name of islands[{first}], too; each "
                "island needs a name, and "
                "so a folder, of its own: leave the names out to use island-0, island-1, ..."
            )


def check_run(config: Config, num_islands: int) -> Corpus:
    """Check all that this machine can check of the run, and return the corpus. Raises ConfigError.

    The corpus is tokenised; it has no texts if islands read them in shards.
    """
    run = config.run
    for index in range(num_islands):
        check_island(run, config.for_island(index), f"island {index}")
        check_network(run, config.for_island(index))
    check_names(config, num_islands)
    check_fragments(run)
    island = config.for_island(0)
    data = run.data.of_island(island.label)
    check_source(data)
    corpus = _prepare(run.model_copy(update={"data": data}), island)
    resolve_model(run.model, corpus.vocab_size)
    return corpus


def _prepare(run: RunConfig, island: IslandConfig) -> Corpus:
    if is_streamed(run.data):
        return without_texts(run.data)
    return prepare_corpus(run.data, island.cache)


def count_params(run: RunConfig, corpus: Corpus) -> int:
    """Return the number of parameters of the run's model."""
    return num_elements(model_specs(run, corpus.vocab_size))


def model_specs(run: RunConfig, vocab_size: int) -> Sequence[ParamSpec]:
    """Return the name and shape of every parameter of the run's model, also of an own model. Raises
    InputError.
    """
    model = resolve_model(run.model, vocab_size)
    if isinstance(model, OwnModel):
        from inner.parallel.own_model import own_param_specs

        return own_param_specs(model, run.data.seq_len)
    return param_specs(model)


def bigram_baseline(corpus: Corpus) -> float | None:
    """Return the held-out loss of a bigram model, in nats per token.

    None for mixtures, large vocabularies, chat and shards.
    """
    if corpus.vocab_size > MAX_BIGRAM_VOCAB or len(corpus.texts) != 1:
        return None
    (text,) = corpus.texts
    if text.is_coded or isinstance(text.train, StreamedTokens):
        return None
    return bigram_loss(text.train, text.heldout, corpus.vocab_size)
