"""`diloco prepare`: an island's text, tokenised before the run. No torch here."""

import time
from pathlib import Path

from rich.console import Console

from diloco.config import ConfigError, IslandConfig, RunConfig, load_config
from diloco.units import human_count
from inner.config import DataConfig
from inner.data.corpus import Text, check_source, prepare_corpus
from inner.data.prepare import Options, Progress, Report

TELL_SECONDS = 5.0


def data_of(run: RunConfig, island: IslandConfig) -> DataConfig:
    """What the island reads: the run's text, from the places that it has it in. Raises ConfigError."""
    if island.data_paths is None:
        return run.data
    if run.data.mixture:
        raise ConfigError(
            "island.data_paths replaces data.paths, and the run has a data.mixture instead; keep its files in the same "
            "places on all islands, or name them relative to the folder that the island is started in"
        )
    return run.data.model_copy(update={"paths": list(island.data_paths)})


def prepare(path: Path, overrides: list[str], processes: int) -> None:
    """Tokenise the text of a config's island into its cache, and say what is there. Raises ConfigError, InputError."""
    config = load_config(path, overrides)
    island = config.for_island(config.island.index)
    data = data_of(config.run, island)
    check_source(data)
    console = Console(highlight=False, soft_wrap=True)
    corpus = prepare_corpus(data, Path(island.cache_dir).expanduser(), Options(processes, report=told(console)))
    for text in corpus.texts:
        console.print(found_line(text), markup=False)
    console.print(f"ready in {island.cache_dir}", markup=False)


def told(console: Console) -> Report:
    """Says every few seconds how far a preparation is."""
    last = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            console.print(progress_line(progress), markup=False)

    return report


def found_line(text: Text) -> str:
    """What there is of a source, in one line."""
    length = text.heldout_bytes / len(text.heldout)
    return (
        f"{text.name or 'text'}: {human_count(len(text.train))} training and {human_count(len(text.heldout))} held-out "
        f"tokens of {length:.2f} bytes"
    )


def progress_line(progress: Progress) -> str:
    """How far it is, in one line."""
    share = "" if progress.share is None else f", {100 * progress.share:.1f} %"
    return (
        f"{progress.source}: {human_count(progress.num_documents)} documents, {human_count(progress.num_tokens)} "
        f"tokens, {human_count(progress.tokens_per_second)} tokens/s{share}"
    )
