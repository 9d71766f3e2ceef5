"""`diloco doctor` on one machine: what is wrong here is said, with its cure."""

import socket
from pathlib import Path

import pytest

from diloco.config.schema import parse_config
from diloco.doctor.address_checks import check_listening, find_bind_problem
from diloco.doctor.checks import Check
from diloco.doctor.diagnose import Line, diagnose
from diloco.swarm.visit import resolve_local_island
from tests.diloco.doctor.visits import free_port, key_file, texts, troubles
from tests.outer.nets import run
from tests.swarm import TINY


def test_over_tls_each_rank_needs_two_ports_and_an_address_to_tell():
    def listening(*overrides: str) -> list[Line]:
        config = parse_config(TINY, ["outer.transport=tls", "island.ranks=2", *overrides])
        return list(check_listening(resolve_local_island(config, config, None), is_alone=True))

    port = free_port()
    with socket.create_server(("127.0.0.1", port + 3)):
        assert (
            f"{port + 3}: "
            in texts(listening(f"island.listen_port={port}"), "island.listen_port")[0]
        )
    assert troubles(listening("island.listen_host=0.0.0.0")) == [("FAILED", "island.listen_host")]
    assert troubles(listening("island.listen_host=0.0.0.0", "island.announce_host=127.0.0.1")) == []


def local(tmp_path: Path, *overrides: str, text: str = TINY) -> list[Line]:
    """What a doctor says of this machine alone, for an island of this config."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    folders = [f"island.run_dir={tmp_path / 'runs'}", f"island.cache_dir={tmp_path / 'cache'}"]

    async def main() -> list[Line]:
        return [line async for line in diagnose(None, [*folders, *overrides], path)]

    return run(main())


def test_a_machine_in_order_is_warned_only_that_others_cannot_reach_it(tmp_path):
    lines = local(tmp_path)
    # Islands of other tests may have rank stores on this machine.
    of_this_test = [trouble for trouble in troubles(lines) if trouble[1] != "rank stores"]
    assert of_this_test == [("warning", "island.listen_host")]
    assert parse_config(TINY).run.hash in texts(lines, "config")[0]
    assert "run's state takes 282 kB" in texts(lines, "island.run_dir")[0]


def test_the_libp2p_daemon_is_tried(tmp_path):
    assert "starts" in texts(local(tmp_path, "outer.transport=hivemind"), "libp2p")[0]


@pytest.mark.parametrize(
    ("override", "level", "name", "part"),
    [
        (
            "island.listen_host=192.0.2.1",
            "FAILED",
            "island.listen_host",
            "not an address of this machine",
        ),
        ("island.listen_host=0.0.0.0", "FAILED", "island.listen_host", "gloo needs one address"),
        ("island.run_key_file=/nowhere/key", "FAILED", "run key", "cannot read"),
        ("island.run_dir=/dev/null/x", "FAILED", "island.run_dir", "no folder"),
        ("island.micro_batch=7", "FAILED", "config", "micro_batch"),
        ("outer.rouns=3", "FAILED", "config", "did you mean 'rounds'"),
        ("island.announce_host=192.0.2.1", "ok", "island.announce_host", "must forward"),
    ],
)
def test_what_is_wrong_here_is_said_with_its_cure(tmp_path, override, level, name, part):
    found = [c for c in local(tmp_path, override) if isinstance(c, Check) and c.name == name]
    assert [check.level for check in found] == [level] and part in found[0].text


def test_a_taken_port_is_said_before_the_island_finds_out(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        lines = local(tmp_path, f"island.listen_port={port}")
    assert ("FAILED", "island.listen_port") in troubles(lines)
    assert find_bind_problem("127.0.0.1", port) == ""


def test_a_key_that_others_may_read_is_warned_of(tmp_path):
    (override,) = key_file(tmp_path, b"k" * 32)
    (tmp_path / "run.key").chmod(0o644)
    assert ("warning", "run key") in troubles(local(tmp_path, override))
