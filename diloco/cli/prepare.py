"""`diloco prepare`: tokenise the text of an island before the run. Importing this does not import
torch.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.arguments import ConfigPath, Overrides
from diloco.errors import ConfigError
from diloco.formatting import human_count

if TYPE_CHECKING:
    from rich.console import Console

    from diloco.config.schema import IslandConfig
    from inner.config import DataConfig
    from inner.data.prepare import PrepareProgress, ProgressCallback
    from inner.data.streaming.index import ShardIndex
    from inner.data.streaming.publish import Report

REPORT_SECONDS = 5.0


def prepare(
    config: ConfigPath,
    overrides: Overrides = None,
    processes: Annotated[
        int,
        typer.Option(
            min=1, max=1024, help="Number of tokeniser processes (does not change the result)."
        ),
    ] = 1,
    into: Annotated[
        str | None,
        typer.Option(help="Write shards to this folder or URL (s3://...), for data.source=shards."),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Also check the files there, and repair them.")
    ] = False,
) -> None:
    """Tokenise the text of an island (island.index) into its cache, or with --into into a store.

    If the command is killed, running it again continues from where it stopped. A run whose text is
    not in the cache does the same when it starts, in one process. Islands may read a store while it
    is being written.
    """
    from rich.console import Console

    from diloco.config.schema import load_config
    from diloco.runtime.corpus import data_of
    from inner.data.corpus import check_source
    from inner.data.streaming.open import is_streamed
    from inner.data.tokenizer import build_tokenizer, describe_ends

    loaded = load_config(config, overrides or [])
    island = loaded.for_island(loaded.island.index)
    data = data_of(loaded.run, island)
    check_source(data)
    console = Console(highlight=False, soft_wrap=True)
    if data.tokenizer != "bytes":
        ends = describe_ends(build_tokenizer(*data.tokenizer_choice))
        console.print(f"tokenizer {data.tokenizer}: {ends}", markup=False)
    for entry in loaded.data.mixture:
        if not entry.is_read_by(island.label):
            console.print(
                f"{entry.name}: left out, it is for {', '.join(entry.only)} only", markup=False
            )
    if repair and into is None:
        raise ConfigError("--repair checks the files of a store; name it by --into")
    if into is not None:
        _prepare_into(data, into, island, processes, console, is_repaired=repair)
    elif is_streamed(data):
        _prepare_shards(data, island, processes, console)
    else:
        _prepare_whole(data, island, processes, console)


def _prepare_whole(
    data: "DataConfig", island: "IslandConfig", processes: int, console: "Console"
) -> None:
    from inner.data.corpus import prepare_corpus
    from inner.data.prepare import PrepareOptions

    options = PrepareOptions(processes, report=build_reporter(console))
    corpus = prepare_corpus(data, island.cache, options)
    for text in corpus.texts:
        train = human_count(len(text.train))
        heldout = human_count(len(text.heldout))
        size = (
            f"{train} training and {heldout} held-out tokens of "
            f"{text.heldout_bytes / len(text.heldout):.2f} bytes"
        )
        console.print(f"{text.name or 'text'}: {size}", markup=False)
    console.print(f"ready in {island.cache_dir}", markup=False)


def _prepare_shards(
    data: "DataConfig", island: "IslandConfig", processes: int, console: "Console"
) -> None:
    """Make or fetch all shards of all sources into the cache, up to the cache's limit."""
    from diloco.runtime.corpus import stream_options
    from inner.data.corpus import TOKENS
    from inner.data.streaming.open import build_supply, open_cache

    shards = island.shards.model_copy(update={"processes": processes})
    options = stream_options(island.model_copy(update={"shards": shards}))
    cache = open_cache(island.cache, options)
    say = say_now_and_then(console)
    for source in data.sources:
        if source.source == TOKENS:
            continue
        supply = build_supply(source, cache, options)
        number = 0
        supply.begin()
        while number < len(supply.index.shards) or not supply.index.is_complete:
            supply.bring(number)
            number += 1
            say(
                f"{source.source}: {number} shards, {human_count(supply.index.train_tokens)} tokens"
            )
        supply.close()
        console.print(
            f"{source.source}: {number} shards, {human_count(supply.index.train_tokens)} training "
            "tokens"
        )
    console.print(f"ready in {island.cache_dir}", markup=False)


def _prepare_into(
    data: "DataConfig",
    url: str,
    island: "IslandConfig",
    processes: int,
    console: "Console",
    *,
    is_repaired: bool,
) -> None:
    """Write all sources into a store. Each source of a mixture gets a folder of the store."""
    from inner.data.corpus import SHARDS, TOKENS
    from inner.data.streaming.open import shards_identity
    from inner.data.streaming.publish import publish, repair
    from inner.data.streaming.store import Store

    for entry in (entry for entry in data.mixture if entry.only):
        raise ConfigError(
            f"--into: {entry.name} is for {', '.join(entry.only)} only, and other islands read a "
            "store, too; leave out --into, or take the source out of data.mixture for this command"
        )
    for source, name in zip(
        data.sources, [entry.name for entry in data.mixture] or [""], strict=True
    ):
        if source.source in (SHARDS, TOKENS):
            raise ConfigError(
                f"--into: writes text that is tokenised here, and data.source is {source.source}"
            )
        store = Store(f"{url.rstrip('/')}/{name}" if name else url, island.shards.store_seconds)
        report = build_shard_report(console, source.source)
        index = publish(source, shards_identity(source), store, processes, report)
        mended = repair(source, index, store, processes, report) if is_repaired else []
        tokens = f"{human_count(index.train_tokens)} training tokens"
        mending = f"; mended: {', '.join(mended) or 'nothing'}" if is_repaired else ""
        console.print(f"{store.url}: {len(index.shards)} shards, {tokens}{mending}", markup=False)
        console.print(f"  read it with data.source=shards data.paths=[{store.url}]", markup=False)


def say_now_and_then(console: "Console") -> Callable[[str], None]:
    """Return a function that prints a line, unless it printed another one within the last few
    seconds.
    """
    last = time.monotonic()

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            console.print(text, markup=False)

    return say


def build_shard_report(console: "Console", source: str) -> "Report":
    """Return a callback that prints the progress of shards every few seconds."""
    say = say_now_and_then(console)

    def report(index: "ShardIndex", share: float | None) -> None:
        read = "" if share is None else f", {100 * share:.1f} % of the text read"
        say(f"{source}: {len(index.shards)} shards{read}")

    return report


def build_reporter(console: "Console") -> "ProgressCallback":
    """Return a callback that prints the progress of the preparation every few seconds."""
    say = say_now_and_then(console)

    def report(progress: "PrepareProgress") -> None:
        documents = human_count(progress.num_documents)
        tokens = human_count(progress.num_tokens)
        text = (
            f"{documents} documents, {tokens} tokens, "
            f"{human_count(progress.tokens_per_second)} tokens/s"
        )
        share = "" if progress.share is None else f", {100 * progress.share:.1f} %"
        say(f"{progress.source}: {text}{share}")

    return report
