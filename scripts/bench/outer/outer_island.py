"""One island of scripts/bench/outer/outer.py. It reads commands, one JSON object per line, and
answers each with one.

{"do": "open", "what": ..., "seat": {...}}      -> {"bootstrap": [...], "address": ..., "torch":
                                                ...}
{"do": "connect", "addresses": [...]}           -> {}
{"do": "prepare"}                               -> {}
{"do": "run", "at": ..., "timeout": ...}        -> {"ended": ..., "cpu": ..., "sent_bytes": ...,
                                                "digest": ...,
                                                    "flaw": ...}
end of input, or an error (answered)            -> the process ends
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diloco.watchdog.signals import end_with_parent
from scripts.bench.outer.contestants import Contestant, IslandSpec, WrongResult
from scripts.bench.outer.our_contestants import OurReduce, OurSync
from scripts.bench.outer.rival_contestants import Averager, PlainSync, Torch

Message = dict[str, Any]


def build_torchft(spec: IslandSpec) -> Contestant:
    """Build torchft's contestant. torchft is imported only here, because most Pythons lack it."""
    from scripts.bench.outer.torchft_sync import TorchftSync

    return TorchftSync(spec)


BUILDERS: dict[str, Callable[[IslandSpec], Contestant]] = {
    "torch": Torch,
    "gloo": partial(OurReduce, "gloo"),
    "tls": partial(OurReduce, "tls"),
    "tls-4-streams": partial(OurReduce, "tls", tls_streams=4),
    "tls-relayed": partial(OurReduce, "tls"),
    "hivemind": partial(OurReduce, "hivemind"),
    "averager": Averager,
    "plain-sync": PlainSync,
    "torchft-sync": build_torchft,
    "gloo-sync": partial(OurSync, "gloo"),
    "tls-sync": partial(OurSync, "tls"),
    "hivemind-sync": partial(OurSync, "hivemind"),
}


class Island:
    """Executes commands on the contestant that `open` names."""

    def __init__(self) -> None:
        self.contestant: Contestant | None = None

    def answer(self, command: Message) -> Message:
        """Execute one command and return the reply."""
        if command["do"] == "open":
            self.contestant = BUILDERS[command["what"]](IslandSpec(**command["seat"]))
            opened = {"bootstrap": self.contestant.bootstrap, "address": self.contestant.address}
            return opened | {"torch": torch.__version__}
        contestant = self.contestant
        assert contestant is not None, "open comes first"
        if command["do"] == "connect":
            contestant.connect(command["addresses"])
        elif command["do"] == "prepare":
            contestant.prepare()
        elif command["do"] == "run":
            return _run(contestant, command)
        return {}

    def close(self) -> None:
        """Close the contestant."""
        if self.contestant is not None:
            self.contestant.close()


def main() -> None:
    """Serve until the input ends."""
    end_with_parent()
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    # Output of libraries must not mix with the replies.
    os.dup2(2, 1)
    island = Island()
    try:
        for line in sys.stdin:
            print(json.dumps(island.answer(json.loads(line))), file=replies)
    except Exception as error:  # noqa: BLE001 - the bench prints any error and goes on
        traceback.print_exc()
        print(
            json.dumps({"error": (str(error) or type(error).__name__).splitlines()[0]}),
            file=replies,
        )
    try:
        island.close()
    finally:
        # gloo's threads sometimes abort during a normal interpreter shutdown.
        os._exit(0)


def _run(contestant: Contestant, command: Message) -> Message:
    # All processes share the machine's monotonic clock, so all islands start together.
    time.sleep(max(command["at"] - time.monotonic(), 0.0))
    before = contestant.sent_bytes()
    cpu = cpu_seconds()
    contestant.run(command["timeout"])
    reply = {"ended": time.monotonic(), "cpu": cpu_seconds() - cpu}
    after = contestant.sent_bytes()
    reply |= {"sent_bytes": None if before is None or after is None else after - before, "flaw": ""}
    try:
        return reply | {"digest": contestant.digest()}
    except WrongResult as error:
        return reply | {"digest": "", "flaw": str(error)}


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process and its children, such as a libp2p daemon."""
    ticks = 0
    for pid in descendants(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes that this one has started, and of their own children."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(word) for words in lists for word in words]
    return children + [below for child in children for below in descendants(child)]


if __name__ == "__main__":
    main()
