"""One island of scripts/bench/outer.py. It reads commands, one JSON object per line, and answers each with one.

{"do": "open", "what": ..., "seat": {...}}      -> {"bootstrap": [...], "address": ...}
{"do": "connect", "addresses": [...]}           -> {}
{"do": "prepare", "codec": ...}                 -> {}
{"do": "reduce", "at": ..., "timeout": ...}     -> {"ended": ..., "sent_bytes": ..., "digest": ..., "flaw": ...}
end of input, or an error (answered)            -> the process ends
"""

import json
import os
import sys
import time
import traceback
from typing import Any

import torch

from diloco.watch.signals import end_with_parent
from scripts.bench.contestants import BUILDERS, Contestant, IslandSpec, WrongResult

Message = dict[str, Any]


class Island:
    """Executes commands on the contestant that `open` names."""

    def __init__(self) -> None:
        self.contestant: Contestant | None = None

    def answer(self, command: Message) -> Message:
        """Execute one command and return the reply."""
        if command["do"] == "open":
            self.contestant = BUILDERS[command["what"]](IslandSpec(**command["seat"]))
            return {"bootstrap": self.contestant.bootstrap, "address": self.contestant.address}
        contestant = self.contestant
        assert contestant is not None, "open comes first"
        if command["do"] == "connect":
            contestant.connect(command["addresses"])
        elif command["do"] == "prepare":
            contestant.prepare(command["codec"])
        elif command["do"] == "reduce":
            return _reduce(contestant, command)
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
        print(json.dumps({"error": (str(error) or type(error).__name__).splitlines()[0]}), file=replies)
    try:
        island.close()
    finally:
        # gloo's threads sometimes abort during a normal interpreter shutdown.
        os._exit(0)


def _reduce(contestant: Contestant, command: Message) -> Message:
    before = contestant.sent_bytes()
    # All processes share the machine's monotonic clock, so all islands start together.
    time.sleep(max(command["at"] - time.monotonic(), 0.0))
    contestant.reduce(command["timeout"])
    ended = time.monotonic()
    after = contestant.sent_bytes()
    sent = None if before is None or after is None else after - before
    try:
        return {"ended": ended, "sent_bytes": sent, "digest": contestant.digest(), "flaw": ""}
    except WrongResult as error:
        return {"ended": ended, "sent_bytes": sent, "digest": "", "flaw": str(error)}


if __name__ == "__main__":
    main()
