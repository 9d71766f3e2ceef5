"""Start one command for each node of an island, and end all when one fails, as `srun
--kill-on-bad-exit` does.

    python -m diloco.simulate.node_launcher COMMANDS      a list of commands as JSON, by node

`diloco simulate --nodes` starts this program for each island; the commands are torchrun's agents.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from diloco.runtime.processes import NODE
from diloco.runtime.rank_launcher import FORWARDED, STOPS, end_ranks, wait_for_ranks
from diloco.watchdog.signals import end_with_parent


def launch_nodes(commands: Sequence[Sequence[str]]) -> int:
    """Run the command of every node until all end with status 0, or one fails, which ends all
    others.

    Return 0, the status of the failed node, or 128 + the number of the SIGTERM or SIGINT that ended
    this process.
    """
    received: list[int] = []
    for number in (*STOPS, *FORWARDED):
        signal.signal(number, lambda number, _: received.append(number))
    agents = [start_agent(command, node) for node, command in enumerate(commands)]
    try:
        return wait_for_ranks(agents, received, "node")
    finally:
        end_ranks(agents)


def start_agent(command: Sequence[str], node: int) -> subprocess.Popen[bytes]:
    """Start a node's command in a separate session. All processes that it starts are marked with
    the node's number.
    """
    return subprocess.Popen(
        command,
        env={**os.environ, NODE: str(node)},
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


if __name__ == "__main__":
    sys.exit(launch_nodes(json.loads(sys.argv[1])))
