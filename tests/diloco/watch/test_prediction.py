"""What is predicted for a run, and the pace that stands beside it, from folders that the real
record classes wrote.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.config.schema import dump_config, parse_config
from diloco.errors import ConfigError
from diloco.network_emulation.links import AccessLink
from diloco.records.metrics import EvalRecord, EventRecord, Metrics, Record
from diloco.records.run_folder import RunFacts, write_facts
from diloco.watch.command import parse_shared_link
from diloco.watch.feed import Feed
from diloco.watch.prediction_table import prediction_rows
from diloco.watch.view.prediction import RunPrediction
from diloco.watch.view.run_view import RunView
from tests.diloco.sample_records import a_round, a_step

LINK = AccessLink(1e7, 0.05)
STEPS, STEP_SECONDS, ROUND_SECONDS = 8, 0.5, 5.0
CONFIG = (
    "outer: {inner_steps: 8, rounds: 40, transport: tls, start_islands: 2}\ndata: {seq_len: 64}\n"
    "model: {preset: 1m}\noptimizer: {tokens_per_step: 512}\n"
)


def a_cycle(number: int, begin: float) -> list[Record]:
    """A round of STEPS inner steps, after which 1000 bytes are sent in half a second."""
    end = begin + (number + 1) * ROUND_SECONDS
    times = [end - 1.0 - STEP_SECONDS * (STEPS - 1 - step) for step in range(STEPS)]
    steps = [
        replace(a_step(number * STEPS + i + 1), seconds=STEP_SECONDS, time=time)
        for i, time in enumerate(times)
    ]
    return [*steps, a_round(number, time=end)]


def view_of(
    run_dir: Path, rounds: int = 3, config: str = CONFIG, link: AccessLink | None = LINK
) -> RunView:
    (run_dir / "config.yaml").write_text(dump_config(parse_config(config)))
    for name in ("island-0", "island-1"):
        write(
            run_dir, name, [record for number in range(rounds) for record in a_cycle(number, 100.0)]
        )
    view = RunView(run_dir, link)
    view.read()
    return view


def write(run_dir: Path, name: str, records: list[Record]) -> None:
    metrics = Metrics(run_dir / name / "metrics.jsonl")
    for record in records:
        metrics.write(record)
    metrics.close()


def test_the_pace_is_that_of_the_committed_rounds(tmp_path: Path) -> None:
    rows = view_of(tmp_path).islands["island-0"].rows["pace"]
    assert rows == [[110.0, 5.0, 0.8, 1000.0, 16000.0], [115.0, 5.0, 0.8, 1000.0, 16000.0]]


def test_a_restart_begins_the_pace_anew(tmp_path: Path) -> None:
    view = view_of(tmp_path)
    joined = EventRecord(name="joined", time=1000.0)
    write(tmp_path, "island-0", [joined, *a_cycle(3, 1000.0), *a_cycle(4, 1000.0)])
    view.read()
    assert [row[:2] for row in view.islands["island-0"].rows["pace"]][2:] == [[1025.0, 5.0]]


def test_the_prediction_is_that_of_the_planner_for_the_measured_steps(tmp_path: Path) -> None:
    found = RunPrediction(view_of(tmp_path)).find()
    faster = RunPrediction(replace_link(tmp_path, AccessLink(1e9))).find()
    assert found["round_seconds"] > faster["round_seconds"] > STEPS * STEP_SECONDS
    assert found["utilisation"] == pytest.approx(STEPS * STEP_SECONDS / found["round_seconds"])
    assert found["round_bytes"] == faster["round_bytes"] > 1e6
    assert "10 Mbit/s and 50 ms, as --link says" in found["assumed"][0]
    assert "500 ms" in found["assumed"][1] and "2 islands" in found["assumed"][2]


def test_the_needed_link_is_just_fast_enough(tmp_path: Path) -> None:
    needed = RunPrediction(view_of(tmp_path, link=AccessLink(1e7))).find()["needed_rate"]
    shares = [
        RunPrediction(replace_link(tmp_path, AccessLink(f * needed))).find()["utilisation"]
        for f in (0.9, 1.02)
    ]
    assert shares[0] < 0.95 < shares[1]


def replace_link(run_dir: Path, link: AccessLink | None) -> RunView:
    view = RunView(run_dir, link)
    view.read()
    return view


def test_without_a_link_that_of_the_simulation_is_taken_or_the_rate_of_the_reduces(
    tmp_path: Path,
) -> None:
    first = RunPrediction(view_of(tmp_path, link=None)).find()
    assert first["link_rate"] == 16000.0 and first["assumed"][0].startswith("no link is given")
    write_facts(
        tmp_path,
        RunFacts(
            name="x", num_params=1, num_islands=2, total_steps=9, links="1:5mbit,rtt=9ms 1gbit"
        ),
    )
    second = RunPrediction(replace_link(tmp_path, None)).find()
    assert (second["link_rate"], "simulate --link" in second["assumed"][0]) == (5e6, True)


def test_a_link_in_the_config_is_taken(tmp_path: Path) -> None:
    found = RunPrediction(
        view_of(tmp_path, config=CONFIG + "island: {link_mbit: 20}\n", link=None)
    ).find()
    assert (found["link_rate"], "island.link_mbit" in found["assumed"][0]) == (2e7, True)


@pytest.mark.parametrize(
    ("rounds", "config", "why"),
    [(1, CONFIG, "two committed rounds"), (3, CONFIG + "params: abc\n", "own model")],
)
def test_what_is_not_known_is_said(tmp_path: Path, rounds: int, config: str, why: str) -> None:
    assert why in RunPrediction(view_of(tmp_path, rounds, config)).find()["unknown"]


def test_a_folder_without_a_config_has_no_prediction(tmp_path: Path) -> None:
    view = view_of(tmp_path)
    (tmp_path / "config.yaml").unlink()
    assert "config.yaml" in RunPrediction(view).find()["unknown"]


def test_the_loss_is_compared_with_the_baselines_on_as_many_tokens(tmp_path: Path) -> None:
    view = view_of(tmp_path)
    points = [("island-0", 300, 2.2), ("baseline", 200, 2.5), ("baseline", 400, 1.5)]
    for name, tokens, loss in points:
        write(tmp_path, name, [EvalRecord(round=0, tokens=tokens, loss=loss, bits_per_byte=None)])
    view.read()
    state = RunPrediction(view).state()
    assert state["loss_gap"] == pytest.approx(0.1)
    (last,) = [row for row in prediction_rows(state) if row[0].startswith("loss")]
    assert last[2] == "+10.0 %"


def test_the_table_says_what_was_measured_beside_it_and_what_is_to_come(tmp_path: Path) -> None:
    rows = {
        name: (predicted, measured)
        for name, predicted, measured in prediction_rows(state_of(tmp_path))
    }
    assert (
        rows["time per round"][1] == "5.0 s" and rows["share of time in inner steps"][1] == "80.0 %"
    )
    assert rows["the 37 rounds to come"][1] == "185.0 s"


def state_of(tmp_path: Path) -> dict[str, Any]:
    state = RunPrediction(view_of(tmp_path)).state()
    return json.loads(json.dumps(state, allow_nan=False))


def test_the_stream_brings_the_prediction(tmp_path: Path) -> None:
    async def second() -> str:
        events = Feed(RunPrediction(view_of(tmp_path))).events()
        await anext(events)
        async with asyncio.timeout(60):
            while not (event := await anext(events)).startswith("event: predicted"):
                pass
        return event

    assert json.loads(asyncio.run(second()).split("data: ")[1])["round_bytes"] > 1e6


def test_a_link_of_one_island_is_refused() -> None:
    with pytest.raises(ConfigError, match="allowed: one for all"):
        parse_shared_link("0:10mbit")
