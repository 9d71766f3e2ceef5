"""The process that tokenises ahead of training. It speaks JSON over its standard input and output.

its task            {"config": ..., "index": ..., "number": first shard}
{"ask": "make"}     -> {"alive": true} now and then, {"made": entries of the index} or {"made":
                    null} at the end
{"ask": "write"}    -> {"written": true} once the shard is in the file that the request names
any request         -> {"error": text} if the text is broken; then the process ends
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from inner.config import DataConfig
from inner.data.streaming.index import ShardIndex
from inner.data.streaming.make import MadeShard, make_shards
from inner.errors import InputError

ALIVE_SECONDS = 0.5


def serve(processes: int) -> None:
    """Serve the process that has started this one, until that process closes its end or dies."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Standard output is for the answers only, so a library's output is sent to standard error.
    os.dup2(2, 1)
    parent = os.getppid()
    last = 0.0

    def answer(message: Mapping[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    def report(share: float | None) -> None:
        nonlocal last
        if time.monotonic() - last < ALIVE_SECONDS:
            return
        if os.getppid() != parent:
            os._exit(0)
        last = time.monotonic()
        answer({"alive": True})

    try:
        task = json.loads(sys.stdin.readline())
        config = DataConfig.model_validate(task["config"])
        index = ShardIndex.model_validate_json(json.dumps(task["index"]))
        shards = make_shards(config, index, task["number"], processes, report)
        _answer_all(sys.stdin, shards, answer)
    except InputError as error:
        answer({"error": str(error)})
    except BrokenPipeError:
        pass  # The island has ended.


def _answer_all(
    asks: Iterable[str], shards: Iterator[MadeShard], answer: Callable[[Mapping[str, Any]], None]
) -> None:
    made: MadeShard | None = None
    for line in asks:
        ask = json.loads(line)
        if ask["ask"] == "make":
            made = next(shards, None)
            answer({"made": None if made is None else made.made.model_dump(mode="json")})
            continue
        assert made is not None, "a shard must be made before it is written"
        if made.heldout_ids is not None:
            Path(ask["heldout"]).write_bytes(made.heldout_ids.data)
        with Path(ask["path"]).open("r+b") as file:
            file.write(made.ids.data)
        answer({"written": True})
