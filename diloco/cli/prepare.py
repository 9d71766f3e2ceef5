"""`diloco prepare`: tokenises the text of an island before the run. Importing this does not import torch."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.arguments import ConfigPath, Overrides
from diloco.formatting import human_count

if TYPE_CHECKING:
    from rich.console import Console

    from inner.data.prepare import PrepareProgress, ProgressCallback

REPORT_SECONDS = 5.0


def prepare(
    config: ConfigPath,
    overrides: Overrides = None,
    processes: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of tokeniser processes (does not change the result).")
    ] = 1,
) -> None:
    """Tokenise the text of an island (island.index) into its cache.

    If it is killed, running it again continues where it stopped. A run whose text is not in
    the cache does the same when it starts, in one process.
    """
    from rich.console import Console

    from diloco.config.schema import load_config
    from diloco.runtime.corpus import data_of
    from inner.data.corpus import check_source, prepare_corpus
    from inner.data.prepare import PrepareOptions

    loaded = load_config(config, overrides or [])
    island = loaded.for_island(loaded.island.index)
    data = data_of(loaded.run, island)
    check_source(data)
    console = Console(highlight=False, soft_wrap=True)
    options = PrepareOptions(processes, report=build_reporter(console))
    corpus = prepare_corpus(data, Path(island.cache_dir).expanduser(), options)
    for text in corpus.texts:
        train, heldout = human_count(len(text.train)), human_count(len(text.heldout))
        size = f"{train} training and {heldout} held-out tokens of {text.heldout_bytes / len(text.heldout):.2f} bytes"
        console.print(f"{text.name or 'text'}: {size}", markup=False)
    console.print(f"ready in {island.cache_dir}", markup=False)


def build_reporter(console: "Console") -> "ProgressCallback":
    """A callback that prints the progress of the preparation every few seconds."""
    last = time.monotonic()

    def report(progress: "PrepareProgress") -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            documents, tokens = human_count(progress.num_documents), human_count(progress.num_tokens)
            text = f"{documents} documents, {tokens} tokens, {human_count(progress.tokens_per_second)} tokens/s"
            share = "" if progress.share is None else f", {100 * progress.share:.1f} %"
            console.print(f"{progress.source}: {text}{share}", markup=False)

    return report
