"""Alerts: when the rules ask for one, and that it arrives at a command and at a receiver on
loopback.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from diloco.alerts.delivery import deliver
from diloco.alerts.rules import Alert, Rules
from diloco.alerts.watch import AlertWatch
from diloco.config.from_swarm import parse_swarm_config
from diloco.config.island import AlertsConfig
from diloco.errors import ConfigError
from diloco.overview.account import RunAccount
from diloco.records.metrics import EventRecord, Metrics, RoundRecord
from tests.diloco.sample_records import a_round

BEGIN = 1_700_000_000.0
QUIET = AlertsConfig(
    no_commit_minutes=None,
    island_away_minutes=None,
    disk_share=None,
    loss_spike=False,
    disagreement=False,
)
ALERT = Alert(rule="loss_spike", run="test", island="island-0", text="a loss spike", time=BEGIN)
SAVE = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())"


class Receiver:
    """An HTTP server on loopback that keeps what is posted. It refuses the first `num_refused`
    requests.
    """

    def __init__(self, num_refused: int = 0) -> None:
        self.bodies: list[dict[str, object]] = []
        left = [num_refused]
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                left[0] -= 1
                if left[0] < 0:
                    bodies.append(json.loads(body))
                self.send_response(204 if left[0] < 0 else 503)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/alerts"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receive() -> Iterator[Callable[[int], Receiver]]:
    made: list[Receiver] = []

    def start(num_refused: int = 0) -> Receiver:
        made.append(Receiver(num_refused))
        return made[-1]

    yield start
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def commit(number: int, at: float, *names: str) -> RoundRecord:
    return replace(a_round(number), participants=names or ("island-0", "island-1"), time=BEGIN + at)


def rules(config: AlertsConfig, folder: Path) -> tuple[Rules, RunAccount]:
    account = RunAccount()
    return Rules(config, account, folder, BEGIN), account


def test_a_long_time_without_a_commit_is_told_once_and_again_after_the_next_commit(
    tmp_path: Path,
) -> None:
    found, account = rules(QUIET.model_copy(update={"no_commit_minutes": 1.0}), tmp_path)
    assert found.find(BEGIN + 50) == []
    assert found.find(BEGIN + 70) == [
        ("no_commit_minutes", "no round has been committed for 70.0 s")
    ]
    assert found.find(BEGIN + 80) == []
    account.island("island-0").write(commit(0, 90))
    assert found.find(BEGIN + 100) == []
    assert [rule for rule, _ in found.find(BEGIN + 160)] == ["no_commit_minutes"]


def test_an_island_that_is_in_no_commit_for_long_is_told_by_name(tmp_path: Path) -> None:
    found, account = rules(QUIET.model_copy(update={"island_away_minutes": 1.0}), tmp_path)
    island = account.island("island-0")
    island.write(commit(0, 0))
    assert found.find(BEGIN) == []
    for number, at in ((1, 50), (2, 70)):
        island.write(commit(number, at, "island-0"))
    text = "island-1 has been in no committed round for 70.0 s"
    assert found.find(BEGIN + 71) == [("island_away_minutes", text)]
    island.write(commit(3, 80))
    assert found.find(BEGIN + 81) == []


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    found, _ = rules(QUIET.model_copy(update={"disk_share": 1e-9}), tmp_path)
    ((rule, text),) = found.find(BEGIN)
    assert rule == "disk_share" and f"the disk of {tmp_path}" in text
    assert rules(QUIET.model_copy(update={"disk_share": 1 - 1e-9}), tmp_path)[0].find(BEGIN) == []


@pytest.mark.parametrize("is_on", [True, False])
def test_spikes_and_disagreements_are_told_with_their_cure(tmp_path: Path, is_on: bool) -> None:
    config = QUIET.model_copy(update={"loss_spike": is_on, "disagreement": is_on})
    found, account = rules(config, tmp_path)
    island = account.island("island-0")
    island.write(EventRecord(name="loss spike", text="inner step 7: loss 9", time=BEGIN))
    cause = "island-0: digest 00112233aabb; island-1: digest ffeeddccbbaa"
    island.write(replace(a_round(1, committed=False), cause=cause, time=BEGIN))
    texts = dict(found.find(BEGIN))
    assert list(texts) == (["loss_spike", "disagreement"] if is_on else [])
    if is_on:
        assert "island-0: loss spike: inner step 7: loss 9. Cure: none if" in texts["loss_spike"]
        assert f"round 1: {cause}" in texts["disagreement"]


def test_an_alert_arrives_at_a_command_and_at_a_webhook(
    tmp_path: Path, receive: Callable[[int], Receiver]
) -> None:
    receiver = receive(0)
    command = (sys.executable, "-c", SAVE, str(tmp_path / "alert.json"))
    assert deliver(ALERT, AlertsConfig(command=command, webhook=receiver.url))
    (posted,) = receiver.bodies
    assert posted == json.loads((tmp_path / "alert.json").read_text())
    assert (posted["rule"], posted["text"]) == ("loss_spike", "test: a loss spike")


def test_a_receiver_that_fails_twice_gets_it_at_the_third_attempt(
    receive: Callable[[int], Receiver],
) -> None:
    pauses: list[float] = []
    receiver = receive(2)
    assert deliver(ALERT, AlertsConfig(webhook=receiver.url), pauses.append)
    assert len(receiver.bodies) == 1 and pauses == [0.0, 2.0, 10.0]


def test_one_way_that_fails_does_not_keep_the_other_from_being_used(
    receive: Callable[[int], Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    receiver = receive(0)
    config = AlertsConfig(command=("/no/such/program",), webhook=receiver.url)
    assert not deliver(ALERT, config, lambda _: None)
    assert len(receiver.bodies) == 1 and "could not be sent" in caplog.text


def test_records_of_a_training_island_lead_to_an_alert(
    tmp_path: Path, receive: Callable[[int], Receiver]
) -> None:
    receiver = receive(0)
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.add_sink(
        AlertWatch(AlertsConfig(webhook=receiver.url), "test", "island-0", tmp_path, every=0.05)
    )
    metrics.write(EventRecord(name="loss spike", text="inner step 7: loss 9", time=time.time()))
    metrics.close()
    assert [body["island"] for body in receiver.bodies] == ["island-0"]


def test_a_swarm_cannot_set_the_command_of_a_joiner() -> None:
    with pytest.raises(ConfigError, match="which only the operator of an island sets"):
        parse_swarm_config("name: x\nisland: {alerts: {command: [touch, /tmp/x]}}\n")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x"])
def test_a_webhook_is_a_web_address(url: str) -> None:
    with pytest.raises(ValueError, match="webhook"):
        AlertsConfig(webhook=url)
