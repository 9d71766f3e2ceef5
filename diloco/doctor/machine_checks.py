"""Checks of `diloco doctor` on this machine alone: versions, config, files, disk, run key,
libp2p.
"""

import os
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from diloco.config.check import check_island, model_specs
from diloco.config.schema import RunConfig
from diloco.doctor.address_checks import check_listening
from diloco.doctor.checks import Check
from diloco.doctor.fabric_checks import check_fabric
from diloco.doctor.listeners import PROC, find_rank_stores
from diloco.errors import ConfigError
from diloco.formatting import human_bytes
from diloco.runtime.devices.gpus import list_gpus
from diloco.swarm.visit import LocalIsland
from inner.errors import InputError as DataError
from inner.files import home_path
from inner.measure.param_specs import num_elements
from outer.errors import InputError
from outer.network.run_key import read_run_key
from outer.packages import has_hivemind, require_hivemind
from outer.transports.gloo.open_files import find_allowed_files

NUM_GROUPS = 4
"""gloo groups of all ranks: torch's world, the rank group, the background and checkpoint groups."""
OTHER_FILES = 512
DAEMON_SECONDS = 20.0
LOW_DISK_BYTES = 1_000_000_000


def check_machine(local: LocalIsland, *, is_alone: bool) -> Iterator[Check]:
    """Run all checks that need no swarm. `is_alone` means that the given swarm is on this
    machine.
    """
    yield check_versions(local)
    yield check_config(local)
    if not local.network.leaves_process:
        yield Check("ok", "network", f"outer.transport={local.transport} needs no network")
    else:
        yield from check_listening(local, is_alone=is_alone)
    yield check_rank_stores()
    yield from check_fabric(os.environ, has_gpus=local.island.device != "cpu" and bool(list_gpus()))
    yield check_open_files(local.island.ranks)
    yield from check_disk(local)
    yield Check("ok", "clock", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC by this machine's clock")
    if local.island.run_key_file is not None:
        yield check_key(home_path(local.island.run_key_file, "island.run_key_file"))
    if local.network.has_daemon and has_hivemind():
        yield check_daemon()


def check_versions(local: LocalIsland) -> Check:
    """Check that the packages the island needs are installed, and report their versions."""
    from outer.diagnostics import PACKAGES, VERSION, package_versions

    found = package_versions()
    text = f"{', '.join(f'{name} {number}' for name, number in found.items())}, wire {VERSION}"
    if missing := [
        package for package in PACKAGES if package not in found and package != "hivemind"
    ]:
        return Check(
            "FAILED", "versions", f"{text}; not installed: {', '.join(missing)}; run scripts/setup"
        )
    if local.network.has_daemon:
        try:
            require_hivemind("outer.transport=hivemind, the default,")
        except InputError as error:
            return Check("FAILED", "versions", f"{text}; {error}")
    return Check("ok", "versions", text)


def check_config(local: LocalIsland) -> Check:
    """Check that the island's mesh and micro-batch can train the run. The file itself has been
    validated already.
    """
    run = local.run
    island = local.island
    if run is None:
        return Check(
            "ok",
            "config",
            "none given; --config FILE also checks it and compares it with the swarm's config",
        )
    text = (
        f"run {run.name!r}, hash {run.hash}, {island.label!r} of {island.ranks} ranks over "
        f"{local.transport}"
    )
    try:
        check_island(run, island, island.label)
    except ConfigError as error:
        return Check("FAILED", "config", f"{text}: {error}")
    return Check("ok", "config", text)


def check_rank_stores() -> Check:
    """Check that other machines cannot reach a store where an island's ranks meet."""
    where = "rank stores"
    whose = "among the processes that this user may look at"
    if not PROC.exists():
        return Check("ok", where, "not checked, because this machine has no /proc")
    found = ", ".join(map(str, find_rank_stores()))
    if found:
        text = (
            f"{found}: whoever reaches a store of an island's ranks can run code there; start "
            "an island of one node "
        )
        text += (
            "with `diloco launch`, and close these ports for an island of several nodes, as "
            "docs/operating.md says"
        )
        return Check("warning", where, text)
    return Check("ok", where, f"none listens beyond loopback, {whose}")


def count_needed_files(num_ranks: int) -> int:
    """Count the files that a rank may need open: a socket per other rank in each group, and
    others.
    """
    return NUM_GROUPS * (num_ranks - 1) + OTHER_FILES


def check_open_files(num_ranks: int) -> Check:
    """Check that a rank may open a socket for each other rank, once it has raised its soft
    limit.
    """
    allowed = find_allowed_files()
    needed = count_needed_files(num_ranks)
    text = f"a process may open {allowed} files, and a rank of {num_ranks} may need {needed}"
    if allowed < needed:
        cure = "raise the hard limit: ulimit -Hn, LimitNOFILE of systemd, or the container's limit"
        return Check("warning", "open files", f"{text}; {cure}")
    return Check("ok", "open files", text)


def check_disk(local: LocalIsland) -> Iterator[Check]:
    """Check that there is space for the state that an island may download, and for the tokenised
    text.
    """
    state = state_bytes(local.run) if local.run is not None else 0
    cache = local.island.cache
    for where, path, needed in (
        ("island.run_dir", local.folder, state),
        ("island.cache_dir", cache, 0),
    ):
        existing = next(
            folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
        )
        free = shutil.disk_usage(existing).free
        text = f"{path}: {human_bytes(free)} free"
        text += f", the run's state takes {human_bytes(needed)}" if needed else ""
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            yield Check(
                "FAILED",
                where,
                f"{path}: {existing} is no folder that this user may write to; set {where}",
            )
        elif free < needed:
            yield Check(
                "FAILED", where, f"{text}; free some space, or set {where} to a larger disk"
            )
        elif free < needed + LOW_DISK_BYTES:
            yield Check(
                "warning",
                where,
                f"{text}, which is little; free some space, or set {where} to a larger disk",
            )
        else:
            yield Check("ok", where, text)


def state_bytes(run: RunConfig) -> int:
    """Return the bytes of the state that a joiner downloads: params and outer momentum in fp32.

    It is 0 if the tokenizer is missing.
    """
    from inner.data.tokenizer import build_tokenizer

    try:
        vocab_size = run.model.vocab_size or build_tokenizer(*run.data.tokenizer_choice).vocab_size
        return 2 * 4 * num_elements(model_specs(run, vocab_size))
    except (DataError, OSError):
        return 0


def check_key(path: Path) -> Check:
    """Check that the run key can be read, and only by this user."""
    try:
        read_run_key(path)
    except InputError as error:
        return Check("FAILED", "run key", str(error))
    if path.stat().st_mode & 0o004:
        return Check(
            "warning",
            "run key",
            f"all users of this machine can read {path}; run `chmod 600 {path}`",
        )
    return Check(
        "ok", "run key", f"{path}: readable; the swarm shows whether it is the key of the run"
    )


def check_daemon() -> Check:
    """Check that hivemind's libp2p daemon starts on this machine."""
    from outer.membership.dht.membership import serve_bootstrap
    from outer.network.event_loop import EventLoopThread

    loop = EventLoopThread()
    began = time.monotonic()
    try:
        peer = loop.run(
            serve_bootstrap(["/ip4/127.0.0.1/tcp/0"], None), timeout_seconds=DAEMON_SECONDS
        )
        seconds = time.monotonic() - began
        loop.run(peer.close(), timeout_seconds=DAEMON_SECONDS)
    except (InputError, OSError, TimeoutError) as error:
        cause = str(error) or f"it does not start within {DAEMON_SECONDS:g} s"
        return Check(
            "FAILED", "libp2p", f"{cause}; hivemind includes its daemon: run scripts/setup again"
        )
    finally:
        loop.close()
    return Check("ok", "libp2p", f"hivemind's daemon starts, in {seconds:.1f} s")
