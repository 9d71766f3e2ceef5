"""Load the text that an island reads: its config and the tokenised corpus. Importing this does not
import torch.

`python -m diloco.runtime.corpus PROCESSES` is an island's process that tokenises text ahead of
training.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

from diloco.config.schema import IslandConfig, RunConfig, longest_sequence
from diloco.errors import ConfigError
from inner.config import DataConfig, MixtureEntry, SourceConfig
from inner.data.corpus import Corpus, Text, prepare_corpus, without_texts
from inner.data.streaming.open import StreamOptions, is_streamed, open_streamed
from inner.data.streaming.worker import serve
from inner.files import home_path


def data_of(run: RunConfig, island: IslandConfig) -> DataConfig:
    """Return the run's data config, with the places that this island sets for itself. Raises
    ConfigError.

    `seq_len` is the longest sequence of all stages, so that the held-out text is long enough for
    each of them.
    """
    data = run.data
    unknown = set(island.mixture_paths) - {entry.name for entry in data.mixture}
    if unknown:
        names = ", ".join(entry.name for entry in data.mixture) or "no data.mixture"
        raise ConfigError(f"island.mixture_paths: got {sorted(unknown)}; the run has {names}")
    if island.data_paths is not None and data.mixture:
        raise ConfigError(
            "island.data_paths replaces data.paths, and the run has a data.mixture instead; set "
            "island.mixture_paths={NAME: [PATH]}"
        )
    change: dict[str, Any] = {"seq_len": longest_sequence(run)}
    change |= {} if island.tokenizer is None else {"tokenizer": island.tokenizer}
    if island.data_paths is not None:
        change |= _at_places(data, island.data_paths, "island.data_paths")
    if island.mixture_paths:
        change["mixture"] = tuple(
            _moved(entry, island.mixture_paths.get(entry.name)) for entry in data.mixture
        )
    try:
        return data.model_copy(update=change).of_island(island.label)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _moved(entry: MixtureEntry, places: tuple[str, ...] | None) -> MixtureEntry:
    if places is None:
        return entry
    return entry.model_copy(update=_at_places(entry, places, f"island.mixture_paths.{entry.name}"))


def _at_places(source: SourceConfig, places: tuple[str, ...], key: str) -> dict[str, Any]:
    """Return the changes to a source that is read from these places. Raises ConfigError."""
    if source.source != "huggingface":
        return {"paths": list(places)}
    if len(places) != 1 or not home_path(places[0], key).is_dir():
        raise ConfigError(
            f"{key}: got {list(places)}; a dataset of Hugging Face is in one folder: name that "
            "folder"
        )
    return {"dataset": places[0]}


def load_corpus(config: RunConfig, island: IslandConfig) -> Corpus:
    """Load the island's text from its cache, or tokenise it now. Text that is read in shards is
    only loaded in part.

    The corpus must be closed after use.
    """
    data = data_of(config, island)
    cache_dir = island.cache
    if is_streamed(data):
        corpus = open_streamed(data, cache_dir, stream_options(island))
    else:
        corpus = prepare_corpus(data, cache_dir)
    texts = [
        mark_own(text, entry, island.label)
        for text, entry in zip(corpus.texts, data.mixture, strict=False)
    ]
    return replace(corpus, texts=tuple(texts) or corpus.texts)


@contextmanager
def loading_corpus(
    config: RunConfig, island: IslandConfig
) -> "Iterator[tuple[Corpus, Callable[[], Corpus]]]":
    """Yield what the model must know of the island's text, and a function that waits for the whole
    corpus.

    The function returns the same as `load_corpus`. For text that is read in shards, a thread waits
    for the first shards; a reader that comes earlier waits with its own deadlines. The corpus is
    closed at the end of the block. Raises InputError.
    """
    data = data_of(config, island)
    if not is_streamed(data):
        corpus = load_corpus(config, island)
        yield corpus, lambda: corpus
        return
    loading: Future[Corpus] = Future()
    # A daemon thread, because a store may be silent for minutes and a failed island must not wait
    # for it.
    Thread(
        target=lambda: _fulfil(loading, partial(load_corpus, config, island)),
        name="text",
        daemon=True,
    ).start()
    try:
        yield without_texts(data), loading.result
    finally:
        if loading.done() and loading.exception() is None:
            loading.result().close()


def _fulfil(future: "Future[Corpus]", load: Callable[[], Corpus]) -> None:
    try:
        future.set_result(load())
    except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the result
        future.set_exception(error)


def mark_own(text: Text, entry: MixtureEntry, label: str) -> Text:
    """Return the text of a source of the mixture as the island named `label` reads it."""
    return replace(text, reader=(entry.only.index(label), len(entry.only))) if entry.only else text


def stream_options(island: IslandConfig) -> StreamOptions:
    """Return the options with which the island reads text in shards."""
    shards = island.shards
    return StreamOptions(
        cache_bytes=None if shards.cache_gb is None else round(shards.cache_gb * 1e9),
        ahead=shards.ahead,
        patience=shards.store_seconds,
        command=[sys.executable, "-m", "diloco.runtime.corpus", str(shards.processes)],
    )


if __name__ == "__main__":
    serve(int(sys.argv[1]))
