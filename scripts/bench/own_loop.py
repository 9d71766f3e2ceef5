"""What `diloco.Islands` costs a loop of one's own: entering a run, and each step outside of rounds.

.venv/bin/python -m scripts.bench.own_loop --ranks 8 --params 1000

One island without others. On a busy machine compare the processor time, not the elapsed time.
"""

import argparse
import os
import socket
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import diloco

STEPS = 500


def build_model(num_params: int) -> nn.Module:
    """A model with so many small parameters."""
    torch.manual_seed(0)
    return nn.ParameterDict({f"param{number}": nn.Parameter(torch.randn(16, 16)) for number in range(num_params)})


def measure(work: str, elapsed_from: float, used_from: float, count: int) -> str:
    """Return a line about work that was done `count` times since both clocks were read."""
    elapsed = (time.perf_counter() - elapsed_from) / count
    used = (time.process_time() - used_from) / count
    return f"{work}: {1000 * elapsed:.3f} ms elapsed, {1000 * used:.3f} ms of processor time in this rank"


def run_rank(rank: int, num_ranks: int, num_params: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    if num_ranks > 1:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    model = build_model(num_params)
    outer = {"transport": "loopback", "rounds": 1, "inner_steps": 100 * STEPS, "start_islands": 1}
    config = {"name": "bench", "outer": outer, "island": {"run_dir": folder}}
    clocks = time.perf_counter(), time.process_time()
    with diloco.Islands(config, model) as islands:
        lines = [measure(f"entering with {num_params} parameters on {num_ranks} ranks", *clocks, 1)]
        clocks = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            islands.step(tokens=1)
        lines.append(measure(f"a step of {STEPS} outside of rounds", *clocks, STEPS))
        if rank == 0:
            print("\n".join(lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--params", type=int, default=1000)
    given = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (given.ranks, given.params, port, folder), given.ranks)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
