"""Three islands train on 2 GB that are written into an object store beside them, in a storm, with
the store away.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("boto3")

import boto3

from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from tests.diloco.checkpoints.s3_server import BUCKET, s3_process
from tests.faults.forked import open_forked_swarm
from tests.faults.storm import StormRunner, StormSettings
from tests.faults.waits import until
from tests.swarm import GUARD_SECONDS, Island

ROOT = Path(__file__).parents[2]
TEXT_BYTES = int(os.environ.get("STREAMING_TEXT_BYTES", 1_050_000_000))
"""Bytes of text, with the tokenizer `bytes` one id of two bytes each: 2.1 GB in the store."""
SHARD_TOKENS = 1 << 21
CACHE_GB, AWAY_SECONDS = 0.2, 60
NUM_FAULTS = 20
URL = f"s3://{BUCKET}/text"
DATA = [
    "data.order=shards",
    f"data.shard_tokens={SHARD_TOKENS}",
    "data.seq_len=64",
    "data.heldout_fraction=0.01",
]


def write_text(path: Path, num_bytes: int = TEXT_BYTES) -> None:
    """Rows of words, drawn with a seed."""
    draw, words = random.Random(0), [path.stem for path in (ROOT / "inner").rglob("*.py")]
    rows = [" ".join(draw.choices(words, k=2000)) for _ in range(500)]
    number, size = 0, 0
    with path.open("w") as file:
        while size < num_bytes:
            text = f"{number} {rows[number % len(rows)]}"
            file.write(json.dumps({"text": text}) + "\n")
            number, size = number + 1, size + len(text)


def config_file(folder: Path) -> Path:
    path = folder / "text.yaml"
    path.write_text(f"data: {{source: files, paths: [{folder / 'text.jsonl'}]}}\n")
    return path


@contextmanager
def writer(folder: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """`diloco prepare --into`, from now on."""
    command = [
        sys.executable,
        "-m",
        "diloco",
        "prepare",
        str(config_file(folder)),
        *DATA,
        "--into",
        URL,
    ]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def freeze_later(pid: int, after: float) -> "subprocess.Popen[bytes]":
    """Freeze a process after some seconds, for AWAY_SECONDS. No thread, because islands are forked
    from here.
    """
    return subprocess.Popen(
        ["sh", "-c", f"sleep {after}; kill -STOP {pid}; sleep {AWAY_SECONDS}; kill -CONT {pid}"]
    )


def cache_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("shards/*/[0-9]*.bin"))


def has_index() -> bool:
    found = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix="text/index.json")
    return found["KeyCount"] > 0


def seconds_to_first_step(island: Island, began: float) -> float:
    until(lambda: island.records("step"), "the first step", island)
    return island.records("step")[0]["time"] - began


READ_ALL = """
import resource, sys
from contextlib import suppress
from pathlib import Path
from inner.config import DataConfig
from inner.data.streaming.open import StreamOptions, open_streamed
url, cache, shard_tokens, limit = sys.argv[1:]
shards = dict(source="shards", paths=[url], order="shards", shard_tokens=int(shard_tokens))
config = DataConfig(**shards, seq_len=64)
corpus = open_streamed(config, Path(cache), StreamOptions(round(float(limit) * 1e9), 2, 240.0, []))
sequences = corpus.texts[0].train.cut(64, 0)
def used():
    total = 0
    for path in Path(cache).glob("shards/*/[0-9]*.bin"):
        with suppress(FileNotFoundError):  # it may make room for another at this moment
            total += path.stat().st_size
    return total
per_shard, most, total = int(shard_tokens) // 64, 0, 0
for shard in range(10**9):
    known, is_all = sequences.count_through(shard)
    if shard * per_shard >= known:
        break
    for position in range(shard * per_shard, min((shard + 1) * per_shard, known), 997):
        total += int(sequences.window(sequences.order[position])[0]) >= 0
    most = max(most, used())
print(shard, most, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
corpus.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_three_islands_stream_two_gigabytes_from_a_store_in_a_storm(tmp_path: Path) -> None:
    """Islands are forked, with torch imported. `tests/integration/test_streaming_start.py` starts
    real ones.
    """
    write_text(tmp_path / "text.jsonl")
    shapes = tuple({"cache_dir": str(tmp_path / f"cache-{index}")} for index in range(4))
    settings = StormSettings("gloo", 3, NUM_FAULTS, rate=6.0, seed=3, shapes=shapes[:3])
    islands = [*shapes[:3], {**shapes[3], "joins": True}]
    place = ["data.source=shards", f"data.paths=[{URL}]", f"island.shards.cache_gb={CACHE_GB}"]
    model = ["model.dim=16", "model.num_heads=2", "model.num_layers=1", "model.ffn_dim=32"]
    sizes = [
        "outer.inner_steps=8",
        "optimizer.tokens_per_step=2048",
        "outer.start_islands=3",
        *model,
    ]
    with s3_process() as server:
        began = time.time()
        with (
            writer(tmp_path) as writing,
            open_forked_swarm(tmp_path, "gloo", islands, *DATA, *place, *sizes) as opened,
        ):
            made, fleet = opened
            storm = StormRunner(made, fleet, settings)
            until(has_index, "the first shard in the store")
            first_shard = time.time() - began
            starts = [seconds_to_first_step(island, began) for island in made.started[:3]]
            print(
                f"{first_shard:.1f} s from the start of the writer to the first shard in the store,"
            )
            print("  and to the islands' first steps", *(f"{seconds:.1f}" for seconds in starts))
            freezing = freeze_later(server.pid, 20)
            storm.until_over()
            freezing.wait(GUARD_SECONDS)
            began = time.time()
            joiner = made.start(3)
            print(f"seconds to the joiner's first step: {seconds_to_first_step(joiner, began):.1f}")
            storm.end_run()
            joiner.signal(signal.SIGTERM)
            joiner.wait()
            used = [cache_bytes(tmp_path / f"cache-{index}") for index in range(4)]
            assert all(0 < each <= CACHE_GB * 1e9 for each in used), used
            assert writing.wait(1500) == 0
            read = [
                sys.executable,
                "-c",
                READ_ALL,
                URL,
                str(tmp_path / "reader"),
                str(SHARD_TOKENS),
                str(CACHE_GB),
            ]
            done = subprocess.run(read, cwd=ROOT, timeout=1500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    shards, most, memory_kb = map(int, done.stdout.split())
    print(
        f"one reader of all: {shards} shards, at most {most / 1e6:.0f} MB on disk, "
        f"{memory_kb / 1e3:.0f} MB of memory"
    )
    assert (
        shards >= TEXT_BYTES * 0.98 // SHARD_TOKENS
        and most <= CACHE_GB * 1e9
        and memory_kb < 1_500_000
    )
    account = data_account(read_run(tmp_path / "test").islands)
    print("account:", account)
    assert account["units_repeated"] == 0 and account["units_trained"] > 0
