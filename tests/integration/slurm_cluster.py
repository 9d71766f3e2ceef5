"""A SLURM cluster on this machine, for tests. Needs root, and Debian's packages slurm-wlm and
munge.

A node is a slurmd in namespaces of its own (mounts, host name, processes), with an address of its
own on loopback. So everything that runs on a node ends with its first process, as when a machine
loses power.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from diloco.watchdog.signals import end_with_parent

PROGRAMS = ("slurmctld", "slurmd", "munged", "unshare")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
COMMAND_SECONDS = 60
GUARD_SECONDS = 300.0
"""Twice the two minutes for which SLURM holds a job that was queued again, and some more."""

CONFIG = """
ClusterName=islands
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=20
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""
NODE = "NodeName={name} NodeAddr={address} Port={port} CPUs=1 Gres=gpu:1"
GPU = "Name=gpu File=/dev/null\n"
"""SLURM hands this device out as a GPU. Nobody opens it."""


class Cluster:
    """The nodes n1, n2, ... with one CPU and one pretended GPU each, and the commands of their
    users.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = {f"n{number}": f"127.0.0.{10 + number}" for number in range(1, num_nodes + 1)}
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def write_config(self) -> None:
        """Write what the daemons read."""
        first, *ports = free_ports(len(self.nodes) + 1)
        named = zip(self.nodes.items(), ports, strict=True)
        nodes = "\n".join(
            NODE.format(name=name, address=address, port=port) for (name, address), port in named
        )
        host = socket.gethostname().partition(".")[0]
        config = CONFIG.format(host=host, control_port=first, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "gres.conf").write_text(GPU)
        hosts = [
            f"127.0.0.1 localhost {host}",
            *(f"{address} {name}" for name, address in self.nodes.items()),
        ]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o400)
        (self.folder / "state").mkdir()

    def start(self) -> None:
        """Start munged, slurmctld and the nodes, and wait until all nodes are idle."""
        options = {name: self.folder / f"munge.{name}" for name in ("socket", "pid", "seed", "log")}
        names = {
            "socket": "--socket",
            "pid": "--pid-file",
            "seed": "--seed-file",
            "log": "--log-file",
        }
        words = [f"{names[key]}={path}" for key, path in options.items()]
        self._start("munged", ["munged", "-F", "-f", f"--key-file={self.folder}/munge.key", *words])
        eventually(options["socket"].exists, "the socket of munged", self.log("munged"))
        self._start("slurmctld", in_namespaces(["--mount"], self.folder, ["slurmctld", "-D"]))
        for name in self.nodes:
            (self.folder / f"spool-{name}").mkdir()
            options_of_node = ["--mount", "--uts", "--pid", "--mount-proc"]
            self._start(
                name,
                in_namespaces(options_of_node, self.folder, ["slurmd", "-D", "-N", name], name),
            )
        logs = [self.log(name) for name in self._daemons]
        eventually(lambda: self._idle() == len(self.nodes), "all nodes idle", *logs)

    def _idle(self) -> int:
        command = ["sinfo", "--noheader", "--Node", "--states=idle", "--format=%N"]
        return len(
            subprocess.run(
                command, env=self.env, capture_output=True, timeout=COMMAND_SECONDS
            ).stdout.split()
        )

    def _start(self, name: str, command: Sequence[str]) -> None:
        with self.log(name).open("wb") as log:
            self._daemons[name] = subprocess.Popen(
                command,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=end_with_parent,
            )

    def log(self, name: str) -> Path:
        """What a daemon has printed."""
        return self.folder / f"{name}.out"

    def stop(self) -> None:
        """Kill all daemons, and with the nodes all that runs on them."""
        for name in reversed(self._daemons):
            self.kill(name)

    def kill(self, name: str) -> None:
        """Kill a daemon, or a node with all its processes."""
        self._daemons[name].kill()
        self._daemons[name].wait(COMMAND_SECONDS)

    def command(self, *words: str, **env: str) -> str:
        """What a SLURM command prints."""
        done = subprocess.run(
            words,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says, by its names."""
        words = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def nodes_of(self, number: str) -> list[str]:
        """The nodes of a running job, the one of the batch script first."""
        return self.command("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()

    def runs_again(self, number: str) -> bool:
        """Whether a job has been queued again and runs. SLURM holds it for two minutes before it
        does.
        """
        job = self.job(number)
        return job["Restarts"] != "0" and job["JobState"] == "RUNNING"


def in_namespaces(
    options: Sequence[str], folder: Path, command: Sequence[str], host_name: str = ""
) -> list[str]:
    """The command with the cluster's host names.

    With processes of its own, the shell stays to reap what a node's jobs leave behind. Else a kill
    reaches the command.
    """
    run = '"$@"; exit' if "--pid" in options else 'exec "$@"'
    script = (
        'mount --bind "$1" /etc/hosts && { [[ -z $2 ]] || hostname "$2"; } && shift 2 && ' + run
    )
    words = ["bash", "-c", script, "node", str(folder / "hosts"), host_name, *command]
    return ["unshare", *options, "--fork", "--kill-child", *words]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def eventually(is_so: Callable[[], bool], what: str, *logs: Path) -> None:
    """Wait until `is_so()`. Fails the test with the ends of the logs if that does not happen."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            ends = "\n".join(
                f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs if log.exists()
            )
            raise AssertionError(f"{what} did not come:\n{ends}")
        time.sleep(0.2)


@contextmanager
def slurm_cluster(folder: Path, num_nodes: int) -> Iterator[Cluster]:
    """A cluster that is ready for jobs, with its files in `folder`. It is killed at the end."""
    cluster = Cluster(folder, num_nodes)
    cluster.write_config()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
