"""How fast `diloco prepare` writes shards in one process, beside a plain loop of json and numpy.

    python -m scripts.bench.inner.prepare [--megabytes N] [--document-bytes N] [--repeat N]

Both read the same .jsonl and write its token ids as uint16, with eos after each document: first
with the byte tokenizer, then with a BPE tokenizer of 8,192 tokens. They take turns. The plain loop
does no more: it has no held-out documents, no index of documents, no resuming and no checks. Times
are CPU seconds; a ratio above 1 means that prepare is faster.
"""

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import tokenizers

from inner.config import DataConfig
from inner.data.corpus import prepare_corpus
from inner.data.prepare import PrepareOptions
from inner.data.sources.stdlib import StdlibSource
from scripts.bench.inner.data import EOS, train_tokenizer

BATCH = 64
"""Documents that the plain loop gives to the tokenizers library at a time."""


def main() -> None:
    """Print a line for each tokenizer."""
    args = _arguments()
    folder = Path(tempfile.mkdtemp(prefix="diloco-prepare-", dir=args.folder))
    try:
        text = folder / "text.jsonl"
        write_text(text, args.megabytes * 10**6, args.document_bytes)
        tokenizer = folder / "tokenizer.json"
        train_tokenizer(text, tokenizer)
        compare("bytes", text, "bytes", args.repeat, folder)
        small = folder / "small.jsonl"
        write_text(small, args.megabytes * 10**6 // 10, args.document_bytes)
        compare("BPE", small, str(tokenizer), args.repeat, folder)
    finally:
        shutil.rmtree(folder)


def compare(name: str, text: Path, tokenizer: str, repeat: int, folder: Path) -> None:
    """Time prepare and the plain loop in turn, and print both speeds and the median ratio."""
    ours: list[float] = []
    plain: list[float] = []
    for _ in range(repeat + 1):
        ours.append(_seconds(lambda: run_prepare(text, tokenizer, folder / "cache")))
        plain.append(_seconds(lambda: run_plain(text, tokenizer, folder / "plain.bin")))
        shutil.rmtree(folder / "cache")
    megabytes = text.stat().st_size / 1e6
    ratios = [theirs / mine for mine, theirs in zip(ours[1:], plain[1:], strict=True)]
    print(
        f"{name}: {megabytes:.0f} MB, prepare {megabytes / median(ours[1:]):.1f}, "
        f"plain loop {megabytes / median(plain[1:]):.1f} MB per CPU second; "
        f"ratio {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def run_prepare(text: Path, tokenizer: str, cache: Path) -> None:
    """Write shards of the text with our prepare."""
    eos = None if tokenizer == "bytes" else EOS
    config = DataConfig(source="files", paths=[str(text)], tokenizer=tokenizer, eos=eos)
    prepare_corpus(config, cache, PrepareOptions(1, report=lambda progress: None))


def run_plain(text: Path, tokenizer: str, out: Path) -> None:
    """Write the token ids into one file."""
    with text.open("rb") as lines, out.open("wb") as file:
        texts = (json.loads(line)["text"] for line in lines)
        for ids in _plain_bytes(texts) if tokenizer == "bytes" else _plain_bpe(texts, tokenizer):
            file.write(ids.tobytes())


def _plain_bytes(texts: Iterable[str]) -> Iterator[np.ndarray]:
    for text in texts:
        yield np.append(np.frombuffer(text.encode(), np.uint8).astype(np.uint16), np.uint16(257))


def _plain_bpe(texts: Iterator[str], path: str) -> Iterator[np.ndarray]:
    tokenizer = tokenizers.Tokenizer.from_file(path)
    eos = tokenizer.token_to_id(EOS)
    while batch := list(itertools.islice(texts, BATCH)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.array([*encoding.ids, eos], np.uint16)


def write_text(path: Path, num_bytes: int, document_bytes: int) -> None:
    """Write the standard library as rows of about `document_bytes`, repeated until the file has
    `num_bytes`.
    """
    whole = "".join(document.text for document in itertools.islice(StdlibSource().documents(), 400))
    texts = [whole[at : at + document_bytes] for at in range(0, len(whole), document_bytes)]
    with path.open("w", encoding="utf-8") as file:
        for text in itertools.cycle(texts):
            file.write(json.dumps({"text": text}) + "\n")
            if file.tell() >= num_bytes:
                return


def _seconds(work: Callable[[], object]) -> float:
    started_at = time.process_time()
    work()
    return time.process_time() - started_at


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--document-bytes", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--folder", help="where the files are written (the folder for temporary files)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
