"""Tokens per second of the loader relative to the model, and of `prepare` relative to datasets.map.

    python -m scripts.bench.inner.data [--what loader,shards,prepare] [--megabytes N]
        [--processes N,...] [--repeat N]

loader: reads batches of the quickstart's shape from the standard library's tokens, both with all
pages in memory and with an empty page cache, relative to the quickstart's trainer. Each side is one
process with one thread. shards: the same text by shards (data.order: shards), fetched from a folder
through a cache while it is read. prepare: tokenises the standard library's text from a .jsonl file
with a BPE tokenizer of 8192 tokens trained on it. Both sides use the same rows, the same tokenizer
and equally many processes, and write files that can be memory-mapped. Ratios above 1 mean faster.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from diloco.config.schema import Config, load_config
from inner.config import DataConfig
from inner.data.corpus import prepare_corpus
from inner.data.prepare import PrepareOptions
from inner.data.sources.stdlib import StdlibSource
from scripts.bench.arguments import choices, whole_numbers

if TYPE_CHECKING:
    from inner.data.batches import IslandBatches

ROOT = Path(__file__).resolve().parents[3]
EOS = "</s>"
STEPS = 200
WHAT = ("loader", "shards", "prepare")
SHARD_TOKENS = 1 << 20


def main() -> None:
    """Print the ratios."""
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        if "loader" in args.what:
            compare_loader(Path(folder), args.repeat)
        if "shards" in args.what:
            compare_shards(Path(folder), args.repeat)
        if "prepare" in args.what:
            compare_prepare(Path(folder), args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--what", type=choices(WHAT), default=list(WHAT))
    parser.add_argument("--megabytes", type=int, default=16, help="megabytes of text for prepare")
    parser.add_argument("--processes", type=whole_numbers, default=[1, 2])
    parser.add_argument("--repeat", type=int, default=3, help="rounds; medians are printed")
    return parser.parse_args()


def compare_loader(folder: Path, repeat: int) -> None:
    """Print the loader's speed relative to the trainer's, in CPU time, or in wall time where it
    waits for the disk.
    """
    # Imported late, because the processes that tokenise import this file and do not need torch.
    import torch

    from inner.data.batches import IslandBatches

    torch.set_num_threads(1)
    config = load_config(ROOT / "configs/quickstart.yaml")
    corpus = prepare_corpus(config.data, folder / "loader")
    per_step = config.optimizer.tokens_per_step // config.data.seq_len
    batches = IslandBatches(corpus, config.data.seq_len, config.seed, 1, per_step)
    files = list((folder / "loader").rglob("*.bin"))
    step = build_trainer_step(config, batches)
    rows: dict[str, list[float]] = {
        "model": [],
        "loader, pages in memory": [],
        "loader, files forgotten": [],
    }
    for number in range(repeat):
        rows["model"].append(1 / time_action(step, clock=time.process_time))
        steps = range(number * STEPS, (number + 1) * STEPS)
        drop_page_cache(files)
        rows["loader, files forgotten"].append(
            STEPS / time_action(lambda s=steps: read_batches(batches, s))
        )
        in_memory = time_action(lambda s=steps: read_batches(batches, s), clock=time.process_time)
        rows["loader, pages in memory"].append(STEPS / in_memory)
    for what, speeds in rows.items():
        tokens = median(speeds) * config.optimizer.tokens_per_step
        print(
            f"{what:<26}{tokens:>14,.0f} tokens/s{median(speeds) / median(rows['model']):>10.1f} x "
            "model"
        )


def compare_shards(folder: Path, repeat: int) -> None:
    """Print the speed of reading shards from a folder through a cache, in wall time, relative to
    the trainer's.
    """
    import torch

    from inner.data.batches import IslandBatches
    from inner.data.streaming.open import StreamOptions, open_streamed, shards_identity
    from inner.data.streaming.publish import publish
    from inner.data.streaming.store import Store

    torch.set_num_threads(1)
    config = load_config(
        ROOT / "configs/quickstart.yaml", ["data.order=shards", f"data.shard_tokens={SHARD_TOKENS}"]
    )
    store = Store(str(folder / "store"), 60)
    publish(config.data, shards_identity(config.data), store, 1, lambda index, share: None)
    place = {"source": "shards", "paths": [store.url]}
    per_step = config.optimizer.tokens_per_step // config.data.seq_len
    options = StreamOptions(round(12 * 2 * SHARD_TOKENS), 2, 60, [])
    corpus = open_streamed(config.data.model_copy(update=place), folder / "shards", options)
    batches = IslandBatches(corpus, config.data.seq_len, config.seed, 1, per_step)
    step = build_trainer_step(config, batches)
    model = []
    read = []
    for number in range(repeat):
        model.append(1 / time_action(step))
        steps = range(number * STEPS, (number + 1) * STEPS)
        read.append(STEPS / time_action(lambda s=steps: read_batches(batches, s)))
    corpus.close()
    tokens = median(read) * config.optimizer.tokens_per_step
    print(
        f"{'shards through a cache':<26}{tokens:>14,.0f} "
        f"tokens/s{median(read) / median(model):>10.1f} x model"
    )


def build_trainer_step(config: Config, batches: "IslandBatches") -> Callable[[], object]:
    """Build a function that makes one inner step of the quickstart's model, on text that has been
    read beforehand.
    """
    import torch

    from diloco.assemble import build_trainer
    from diloco.runtime.process_group import open_process_group
    from inner.data.corpus import Corpus

    island = config.for_island(0).model_copy(update={"ranks": 1, "device": "cpu"})
    if not torch.distributed.is_initialized():
        open_process_group(island, "cpu").__enter__()
    trainer = build_trainer(config.run, island, Corpus((), 260, 257), "cpu")
    text = batches.micro_batches(0, 0, 1, island.micro_batch)
    trainer.step(text)
    return lambda: trainer.step(text)


def read_batches(batches: "IslandBatches", steps: range) -> None:
    """Read all micro-batches of these steps."""
    for step in steps:
        batches.micro_batches(step, 0, 1, 8)


def drop_page_cache(files: list[Path]) -> None:
    """Ask the system to drop the cached pages of the files. It may keep mapped pages that are in
    use.
    """
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def time_action(
    action: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Run the action, and return its seconds by the clock."""
    started_at = clock()
    action()
    return clock() - started_at


def compare_prepare(folder: Path, args: argparse.Namespace) -> None:
    """Print the time of datasets.map relative to prepare, by number of processes."""
    text = folder / "text.jsonl"
    tokenizer = folder / "tokenizer.json"
    write_text(text, args.megabytes * 10**6)
    train_tokenizer(text, tokenizer)
    import datasets  # noqa: F401 -- imported here so that its import is not measured

    megabytes = text.stat().st_size / 1e6
    for processes in args.processes:
        sides = [
            compare_once(text, tokenizer, folder / "both", processes) for _ in range(args.repeat)
        ]
        wall, cpu = (median(theirs[i] / ours[i] for ours, theirs in sides) for i in (0, 1))
        ours, theirs = (
            megabytes / median(side[0] for side in both) for both in zip(*sides, strict=True)
        )
        print(
            f"{processes} processes: prepare {ours:.2f} MB/s, datasets.map {theirs:.2f} MB/s; "
            f"ratio {wall:.2f} of wall time, {cpu:.2f} of CPU time",
            flush=True,
        )


def compare_once(
    text: Path, tokenizer: Path, folder: Path, processes: int
) -> list[tuple[float, float]]:
    """Return the (wall, CPU) seconds of prepare, then of datasets.map."""
    costs = []
    for side in (run_prepare, run_datasets):
        began = cpu_seconds()
        wall = time_action(lambda side=side: side(text, tokenizer, folder, processes))
        costs.append((wall, cpu_seconds() - began))
        shutil.rmtree(folder, ignore_errors=True)
    return costs


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def run_prepare(text: Path, tokenizer: Path, cache: Path, processes: int) -> None:
    """Write shards of the text with our prepare."""
    config = DataConfig(source="files", paths=[str(text)], tokenizer=str(tokenizer))
    prepare_corpus(config, cache, PrepareOptions(processes, report=lambda progress: None))


def run_datasets(text: Path, tokenizer: Path, cache: Path, processes: int) -> None:
    """Write Arrow files of the text's token ids, with EOS, with datasets."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(cache))
    rows.map(EncodeTexts(str(tokenizer)), batched=True, remove_columns=["text"], num_proc=processes)


class EncodeTexts:
    """Encode a batch of texts to token ids. datasets calls it in its worker processes."""

    def __init__(self, tokenizer: str) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(tokenizer)
        self._eos = self._tokenizer.token_to_id(EOS)

    def __call__(self, rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = self._tokenizer.encode_batch(rows["text"], add_special_tokens=False)
        return {"ids": [[*encoding.ids, self._eos] for encoding in encodings]}


def write_text(path: Path, num_bytes: int) -> None:
    """Write the standard library's files as rows, repeated until the file has `num_bytes`."""
    texts = [document.text for document in StdlibSource().documents()]
    with path.open("w", encoding="utf-8") as file:
        while True:
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                if file.tell() >= num_bytes:
                    return


def train_tokenizer(text: Path, path: Path) -> None:
    """Train a byte-level BPE tokenizer on the first 300 rows of the text."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    with text.open(encoding="utf-8") as lines:
        tokenizer.train_from_iterator(
            (json.loads(line)["text"] for line, _ in zip(lines, range(300), strict=False)), trainer
        )
    tokenizer.save(str(path))


if __name__ == "__main__":
    main()
