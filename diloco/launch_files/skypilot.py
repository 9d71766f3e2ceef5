"""An island as a task of SkyPilot, for a managed job.

The job runs on spot machines, and moves elsewhere when they are taken away.
"""

import shlex
from typing import Any

from diloco.launch_files.islands import RESTARTS, PlacedIsland

HEAD = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
OWN = '"$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")"'


def island_task(island: PlacedIsland, image: str, gpu: str, settings: list[str]) -> dict[str, Any]:
    """Return the task. Its config, run.yaml, is in the folder of the task's file."""
    mounts = {"/tmp/diloco/run.yaml": "./run.yaml"}
    key = []
    if island.run_key_file:
        mounts["/tmp/diloco/run.key"] = island.run_key_file
        key = ["island.run_key_file=/tmp/diloco/run.key"]
    words = island.command("/tmp/diloco/run.yaml", "HEAD", "OWN", [*key, *settings])
    # Only the node's shell knows the addresses.
    line = shlex.join(words).replace("=HEAD:", f"={HEAD}:").replace("=OWN", f"={OWN}")
    return {
        "name": island.name,
        "num_nodes": island.nodes,
        "resources": {
            "accelerators": f"{gpu}:{island.gpus}",
            "use_spot": True,
            "image_id": f"docker:{image}",
            "job_recovery": {"max_restarts_on_errors": RESTARTS},
        },
        "file_mounts": mounts,
        "run": f"exec {line}\n",
    }
