"""torchtitan's trainer on each of its layouts: two islands, of which one is killed in a round and
comes back.

The environment with torchtitan is a different one (docs/library.md):
`.venv-titan/bin/python -m pytest -m slow tests/diloco/titan`
"""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: docs/library.md says how")

from tests.diloco.own_loop.loops import folder_of
from tests.diloco.titan import small
from tests.diloco.titan.islands_of_titan import trains
from tests.swarm import Swarm, read_records, swarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
FAULT = "kill:1@round=1,phase=send"
WAIT_SECONDS = 1500.0
ROUNDS, STEPS = 3, 2
"""The run is over before the trainer's own steps are."""
PP = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
TP = {"tensor_parallel_degree": 2}
EP = {"expert_parallel_degree": 2}
LAYOUTS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "llama3 fsdp2": (small.llama3, 2, {}),
    "llama3 tp2": (small.llama3, 2, TP),
    "llama3 pp2": (small.llama3, 2, PP),
    "llama3 replicate2": (small.llama3, 2, {"data_parallel_replicate_degree": 2}),
    "llama3 hsdp 2 x 2": (small.llama3, 4, {"data_parallel_replicate_degree": 2}),
    "llama3 interleaved": (
        small.llama3_of_four,
        2,
        PP | {"pipeline_parallel_schedule": "Interleaved1F1B"},
    ),
    "llama3 pp2 x fsdp2": (small.llama3, 4, PP),
    "llama3 recomputed": (small.llama3_recomputed, 2, {}),
    "qwen3 tied tp2": (small.qwen3_tied, 2, TP),
    "qwen3 moe ep2": (small.qwen3_moe, 2, EP),
    "qwen3 moe tp2": (small.qwen3_moe, 2, TP),
    "qwen3 moe edp2 x ep2": (small.qwen3_moe, 4, EP),
    "deepseek_v3 ep2": (small.deepseek_v3, 2, EP),
    "deepseek_v3 fsdp2": (small.deepseek_v3, 2, {}),
    "deepseek_v3 pp2": (small.deepseek_v3, 2, PP),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_islands_end_with_one_model_though_one_was_killed_in_a_round(
    tmp_path: Path, layout: str
) -> None:
    make, ranks, degrees = LAYOUTS[layout]
    work = partial(trains, make, outer={"rounds": ROUNDS, "inner_steps": STEPS}, **degrees)
    with swarm(tmp_path, islands=[{"ranks": ranks}, {"ranks": ranks}]) as made:
        first = made.start(0, work())
        dies = made.start(1, work(island={"faults": [FAULT]}))
        assert dies.wait(WAIT_SECONDS)[0] == -signal.SIGKILL, dies.log[-4000:]
        back = made.start(1, work())
        for island in (first, back):
            island.finish(WAIT_SECONDS)
        ends = [first.result(), back.result()]
    assert ends[0]["digest"] == ends[1]["digest"]
    assert ends[0]["tensors"] == ends[1]["tensors"] != {}
    assert ends[0]["step"] == ends[1]["step"] == ROUNDS * STEPS
    committed = [
        record
        for record in records_of(made, 0)
        if record["kind"] == "round" and record["committed"]
    ]
    assert {record["tokens"] for record in committed} == {STEPS * small.SEQUENCES * small.SEQ_LEN}
    assert all(record["loss"] > 1 for record in records_of(made, 0) if record["kind"] == "step")
    logged = [metrics.get("islands/round") for metrics in ends[0]["steps"].values()]
    assert [number for number in logged if number is not None] == [0, 1], (
        "the last round lands after the last line"
    )
    rates = [{step: lr_of(metrics) for step, metrics in end["steps"].items()} for end in ends]
    assert rates[1].items() <= rates[0].items(), "its learning rate is that of the run"


def records_of(made: Swarm, index: int) -> list[dict[str, Any]]:
    return read_records(folder_of(made.config, index) / "metrics.jsonl")


def lr_of(metrics: dict[str, Any]) -> float:
    return next(value for name, value in metrics.items() if name.startswith("lr/"))
