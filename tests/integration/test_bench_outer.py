"""scripts/bench/outer/outer.py: what it accepts as a synchronisation, and the script as a user runs
it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench.outer.contestants import OUTER, FakeModel, IslandSpec, WrongResult, build_shapes

ROOT = Path(__file__).parents[2]
RUN_SECONDS = 600
NUM_PARAMS = 5000


def build_specs() -> list[IslandSpec]:
    return [IslandSpec(index, 2, NUM_PARAMS, "fp32", "127.0.0.1", []) for index in range(2)]


def build_models() -> list[FakeModel]:
    shapes = build_shapes(NUM_PARAMS).values()
    return [FakeModel(spec, [torch.zeros(shape) for shape in shapes]) for spec in build_specs()]


def test_a_models_shapes_have_as_many_elements_as_are_asked_for():
    for number in (7, 2048, NUM_PARAMS, 3_000_000):
        assert sum(torch.zeros(shape).numel() for shape in build_shapes(number).values()) == number


def test_the_outer_step_on_the_mean_is_accepted_in_every_round_with_one_digest():
    models = build_models()
    params = [torch.nn.Parameter(torch.zeros_like(values)) for values in models[0].tensors]
    optimizer = torch.optim.SGD(params, **OUTER)
    for _ in range(3):
        for model in models:
            model.train()
        for number, param in enumerate(params):
            param.grad = (
                param.detach() - (models[0].tensors[number] + models[1].tensors[number]) / 2
            )
        optimizer.step()
        for model in models:
            for values, param in zip(model.tensors, params, strict=True):
                values.copy_(param.detach())
        assert models[0].digest() == models[1].digest()


def test_params_that_were_not_synchronised_are_a_wrong_result():
    model = build_models()[0]
    model.train()
    with pytest.raises(WrongResult, match="beside SGD on the mean"):
        model.digest()


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS + 60)
def test_each_synchronisation_is_timed_and_gives_the_state_that_plain_torch_gives(tmp_path: Path):
    """A result that differs from plain torch's, or between the islands, would make its row a
    failure.
    """
    command = [
        sys.executable,
        "scripts/bench/outer/outer.py",
        "--params",
        "3e5",
        "--links",
        "loopback",
        "--islands",
        "2",
    ]
    command += ["--what", "plain-sync,gloo-sync", "--codecs", "fp32,int4", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    names = [(row["what"], row["codec"]) for row in rows]
    assert names == [("plain-sync", "fp32"), ("gloo-sync", "fp32"), ("gloo-sync", "int4")]
    for row in rows:
        assert row["failure"] == "" and row["flaws"] == [] and len(row["seconds"]) == 1, row
    assert rows[2]["counted_bytes"][0] < 0.2 * rows[1]["counted_bytes"][0], "int4 against fp32"
    assert "x torchft" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(RUN_SECONDS + 60)
def test_each_reduce_is_timed_and_gives_all_islands_the_same(tmp_path: Path):
    command = [
        sys.executable,
        "scripts/bench/outer/outer.py",
        "--params",
        "3e5",
        "--links",
        "loopback",
        "--islands",
        "2",
    ]
    command += [
        "--what",
        "torch,gloo",
        "--codecs",
        "fp32",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "rows.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["what"] for row in rows] == ["torch", "gloo"]
    for row in rows:
        assert row["failure"] == "" and row["flaws"] == [] and len(row["seconds"]) == 1, row


def test_a_python_without_torchft_is_refused_with_the_cure():
    command = [
        sys.executable,
        "scripts/bench/outer/outer.py",
        "--links",
        "loopback",
        "--what",
        "torchft-sync",
    ]
    done = subprocess.run(
        [*command, "--torchft-python", "/bin/false"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert done.returncode == 2 and "--torchft-python: got '/bin/false'" in done.stderr
    assert "--help says how to make one" in done.stderr
