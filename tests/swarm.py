"""Real islands for tests. Every rank is a forked process that runs the shipped code, so torch is
imported once.
"""

import ctypes
import json
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from diloco.assemble import Runtime
from diloco.config.schema import Config, parse_config
from diloco.train import train
from inner.measure.peak_flops import peak_flops
from outer.membership.rendezvous import serve_rendezvous
from tests.harness import begin_fork

torch.set_num_threads(1)
# An island measures when it starts what its device can do. Those that are forked here have it from
# this process.
peak_flops("cpu", "float32")

CLONE_NEWNET = 0x40000000
GUARD_SECONDS = 150.0
"""How long a test waits for what must come. It is long, because machines that run tests are
busy.
"""

TEXT = (
    "def add(a, b):\n    return a + b\n\n\nclass Point:\n    def __init__(self, x, y):\n       "
    " self.x, self.y = x, y\n"
)

TINY = """
name: test
model: {dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_dim: 64}
data: {source: files, seq_len: 32, heldout_fraction: 0.3}
optimizer: {lr: 1e-2, tokens_per_step: 512, warmup_steps: 0, schedule: constant}
outer: {rounds: 3, inner_steps: 2, part_elements: 1024, transport: gloo, wait_seconds: 60}
evaluate: {tokens: 512}
island: {micro_batch: 4, connect_seconds: 20, checkpoint: {every_rounds: null}}
"""


class Rank:
    """A forked process with its log."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.exit_code: int | None = None

    def wait(self, deadline: float) -> int:
        """Wait for the exit code, negative if a signal ended it. Fails the test with the log if it
        does not end.
        """
        while self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise AssertionError(
                    f"process {self.pid} did not end in time:\n{self.log.read_text()[-3000:]}"
                )
            else:
                time.sleep(0.02)
        return self.exit_code

    @property
    def is_stopped(self) -> bool:
        if self.exit_code is not None:
            return False
        status = Path(f"/proc/{self.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has already been reaped."""
        if self.exit_code is None:
            os.kill(self.pid, number)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl that may not exist yet.

    A line that is being written has no end yet. A line whose writer was killed is not JSON.
    """
    text = path.read_bytes() if path.exists() else b""
    records: list[dict[str, Any]] = []
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


class Island:
    """The ranks of one island and their records."""

    def __init__(self, folder: Path, ranks: list[Rank]) -> None:
        self.folder, self.ranks = folder, ranks

    def wait(self, timeout_seconds: float = GUARD_SECONDS) -> list[int]:
        """Wait for all ranks and return their exit codes."""
        deadline = time.monotonic() + timeout_seconds
        return [rank.wait(deadline) for rank in self.ranks]

    def finish(self, timeout_seconds: float = GUARD_SECONDS) -> None:
        """Wait for all ranks. Fails the test with the log unless every exit code is 0."""
        codes = self.wait(timeout_seconds)
        assert codes == [0] * len(codes), f"{self.folder.name}: {codes}\n{self.log}"

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def events(self, name: str) -> list[str]:
        """Texts of the island's events with this name."""
        return [r["text"] for r in self.records("event") if r["name"] == name]

    @property
    def is_stopped(self) -> bool:
        """Whether a rank is stopped, by itself or by a signal."""
        return any(rank.is_stopped for rank in self.ranks)

    @property
    def log(self) -> str:
        return "\n".join(rank.log.read_text() for rank in self.ranks)

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Records of this kind from metrics.jsonl."""
        return [r for r in read_records(self.folder / "metrics.jsonl") if r["kind"] == kind]

    def committed(self) -> dict[int, dict[str, Any]]:
        """Records of committed rounds, by round."""
        return {r["round"]: r for r in self.records("round") if r["committed"]}

    def wait_for_round(self, round_number: int, timeout_seconds: float = GUARD_SECONDS) -> None:
        """Wait until the island has committed this round."""
        deadline = time.monotonic() + timeout_seconds
        while round_number not in self.committed():
            assert time.monotonic() < deadline, (
                f"round {round_number} was not committed in time:\n{self.log[-3000:]}"
            )
            time.sleep(0.02)

    def result(self) -> Any:
        """The value that `work` returned on rank 0."""
        return pickle.loads((self.folder / "result.pickle").read_bytes())


Work = Callable[[Config, int], Any]


class Swarm:
    """The islands of one config, with a folder of text and a rendezvous."""

    def __init__(
        self, folder: Path, overrides: list[str], islands: list[dict[str, Any]], address: str
    ) -> None:
        self.folder, self.address = folder, address
        text_folder = folder / "text"
        text_folder.mkdir(parents=True, exist_ok=True)
        for number in range(40):
            (text_folder / f"{number}.txt").write_text(f"# file {number}\n" + TEXT * 8)
        own = [
            f"data.paths=[{text_folder}]",
            f"island.run_dir={folder}",
            f"island.cache_dir={folder / 'cache'}",
            f"island.bootstrap=[{address}]" if address else "island.bootstrap=[]",
            f"islands={json.dumps(islands)}",
            f"outer.start_islands={len(islands)}",
        ]
        self.config = parse_config(TINY, [*own, *overrides])
        self.started: list[Island] = []
        self.inside: dict[int, str] = {}
        """Network namespace of an island's ranks, by island. Other islands share the test's
        namespace.
        """
        self.has_own_shared_memory = False
        """Whether each island that a launcher starts gets a /dev/shm of its own."""

    def start(self, index: int, work: Work = train, config: Config | None = None) -> Island:
        """Start island `index` by forking its ranks."""
        config = config or self.config
        settings = config.for_island(index)
        folder = Path(settings.run_dir) / config.name / settings.label
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        size = settings.ranks

        def life() -> Any:
            if index in self.inside:
                enter_namespace(self.inside[index])
            return work(config, index)

        ranks = [self._fork(rank, size, port, folder, life) for rank in range(size)]
        self.started.append(Island(folder, ranks))
        return self.started[-1]

    def start_all(self, work: Work = train) -> list[Island]:
        return [self.start(index, work) for index in range(len(self.config.islands))]

    def run_all(self) -> list[Island]:
        """Start all islands, and return them when they have finished without an error."""
        islands = self.start_all()
        for island in islands:
            island.finish()
        return islands

    def end(self) -> None:
        """Kill all islands that still run."""
        for island in self.started:
            island.signal(signal.SIGKILL)
            island.wait()

    def _fork(
        self, rank: int, num_ranks: int, port: int, folder: Path, work: Callable[[], Any]
    ) -> Rank:
        log = folder / f"log-{rank}.txt"
        log.touch()
        pid = os.fork()
        if pid:
            return Rank(pid, log)
        code = 1
        begin_fork()
        try:
            output = os.open(log, os.O_WRONLY | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            # pytest has replaced both with its own files.
            sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            result = work()
            if rank == 0:
                (folder / "result.pickle").write_bytes(pickle.dumps(result))
            code = 0
        except BaseException:  # noqa: BLE001 - the test finds it in the log
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def enter_namespace(name: str) -> None:
    """Move this process, which must have a single thread, into a network namespace. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name!r}")


@contextmanager
def swarm(
    folder: Path, *overrides: str, islands: list[dict[str, Any]], address: str = ""
) -> Iterator[Swarm]:
    """Open a swarm with a rendezvous in this process, unless `address` is given. Kills all islands
    at exit.
    """
    rendezvous = serve_rendezvous("127.0.0.1", 0)
    made = Swarm(folder, list(overrides), islands, address or rendezvous.address)
    try:
        yield made
    finally:
        made.end()
        rendezvous.close()


def kill_in_step(steps: int, parts: Runtime, before: Callable[[], None] = lambda: None) -> None:
    """Let this process kill itself in its inner step `steps`, before the step is recorded or sent;
    call `before` then.

    What has been saved is whole.
    """
    made = [0]

    def die(seconds: float) -> None:
        made[0] += 1
        if made[0] == steps:
            assert parts.checkpoints is not None
            parts.checkpoints.wait()
            before()
            os.kill(os.getpid(), signal.SIGKILL)

    parts.slow_down = die


def train_and_return_params(config: Config, index: int) -> dict[str, torch.Tensor]:
    """Train an island and return the local params of rank 0, which must hold the whole model."""
    from diloco import island as life

    params: dict[str, torch.Tensor] = {}

    def live(parts: Runtime) -> None:
        life.run(parts)
        params.update(params_of(parts))

    train(config, index, live)
    return params


def params_of(parts: Runtime) -> dict[str, torch.Tensor]:
    """This rank's slices by name, which are the whole model in an island of one rank."""
    params = parts.trainer.params
    return {held.name: params.read(i).clone() for i, held in enumerate(params.slices)}
