"""How long islands take from nothing to their first step on a text that is being written into an
object store.

All processes are started as users start them. `pytest -m slow
tests/integration/test_streaming_start.py -s` prints the seconds. The processor time of each tells
how much of them other work on the machine adds.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("boto3")

import boto3

from tests.diloco.checkpoints.s3_server import BUCKET, s3_process
from tests.faults.bootstraps import bootstrap
from tests.faults.waits import until
from tests.integration.test_streaming_storm import (
    DATA,
    ROOT,
    URL,
    config_file,
    has_index,
    write_text,
)
from tests.swarm import TINY, read_records

TEXT_BYTES = 300_000_000
MODEL = ["model.dim=16", "model.num_heads=2", "model.num_layers=1", "model.ffn_dim=32"]
SIZES = [
    "outer.rounds=100000",
    "outer.inner_steps=8",
    "optimizer.tokens_per_step=2048",
    "outer.start_islands=3",
]
PLACE = ["data.source=shards", f"data.paths=[{URL}]", "island.shards.cache_gb=0.2"]


@contextmanager
def diloco(*words: str, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a command until the end of the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "diloco", *words], cwd=ROOT, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def processor_seconds(pid: int) -> float:
    """Processor time of a process and its children so far, in seconds."""
    user, system = map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (user + system) / os.sysconf("SC_CLK_TCK") + sum(
        processor_seconds(int(child)) for child in children
    )


def is_whole_text_there() -> bool:
    """Whether the writer has ended the text."""
    body = boto3.client("s3").get_object(Bucket=BUCKET, Key="text/index.json")["Body"].read()
    return b'"is_complete":true' in body


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_islands_train_while_the_text_is_written_and_a_joiner_enters(tmp_path: Path) -> None:
    write_text(tmp_path / "text.jsonl", TEXT_BYTES)
    (tmp_path / "run.yaml").write_text(TINY)

    def first_step(index: int) -> float:
        path = tmp_path / "test" / f"island-{index}" / "metrics.jsonl"
        until(
            lambda: any(each["kind"] == "step" for each in read_records(path)),
            f"step 1, see {tmp_path}",
        )
        return next(each["time"] for each in read_records(path) if each["kind"] == "step")

    def island(index: int, *own: str) -> "subprocess.Popen[bytes]":
        words = [
            f"island.index={index}",
            f"island.run_dir={tmp_path}",
            f"island.cache_dir={tmp_path}/cache-{index}",
        ]
        words += [
            *DATA,
            *PLACE,
            *MODEL,
            *SIZES,
            "outer.transport=tls",
            f"island.bootstrap=[{place.address}]",
            *own,
        ]
        log = tmp_path / f"log-{index}.txt"
        return stack.enter_context(diloco("launch", str(tmp_path / "run.yaml"), *words, log=log))

    with s3_process(), bootstrap("tls", tmp_path / "bootstrap") as place, ExitStack() as stack:
        began = time.time()
        words = ["prepare", str(config_file(tmp_path)), *DATA, "--into", URL]
        stack.enter_context(diloco(*words, log=tmp_path / "writer.txt"))
        islands = [island(index) for index in range(3)]
        until(has_index, "the first shard in the store")
        print(
            f"\nfrom the start of the writer and three islands: {time.time() - began:.1f} s to the "
            "first shard,"
        )
        starts = [first_step(index) - began for index in range(3)]
        spent = [processor_seconds(process.pid) for process in islands]
        print(
            "  and",
            *(f"{seconds:.1f}" for seconds in starts),
            "s to the islands' first steps, with",
        )
        print("  ", *(f"{seconds:.1f}" for seconds in spent), "s of processor time each")
        assert not is_whole_text_there()
        began = time.time()
        joiner = island(3, "island.joins=true")
        seconds = first_step(3) - began
        print(f"joiner: {seconds:.1f} s, {processor_seconds(joiner.pid):.1f} s of processor time")
