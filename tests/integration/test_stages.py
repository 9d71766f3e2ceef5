"""Stages of a run: real islands change mixture, length, batch and learning rate together, resumed
and joined too.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.assemble import Runtime
from diloco.config.schema import Config, dump_config
from diloco.island import run as live
from diloco.records.run_folder import read_run
from diloco.report.data_account import data_account
from diloco.train import train
from tests.integration.test_resume import come_together
from tests.swarm import GUARD_SECONDS, TEXT, Island, kill_in_step, swarm

ROOT = Path(__file__).parents[2]

CYCLE = 2 * 2 * 512
"""Tokens of two islands in two steps."""
STAGES = [
    {"tokens": 2 * CYCLE},
    {"tokens": 2 * CYCLE // 2, "tokens_per_step": 256, "seq_len": 16, "weights": {"prose": 0}},
    {"lr": 0.002},
]
SETTINGS = ["outer.rounds=6", "outer.quorum=2", "outer.delay=1", "island.checkpoint.every_rounds=1"]
FIRST_STEPS = {1: 512, 5: 256, 9: 512}
"""Tokens of an island's step by the first step of each stage."""


def staged(folder: Path) -> list[str]:
    """Settings of a mixture of two sources whose stages are those above."""
    mixture = []
    for name in ("code", "prose"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(60):
            (folder / name / f"{number}.txt").write_text(f"# {name} {number}\n" + TEXT * 4)
        mixture.append(
            {"name": name, "weight": 1, "source": "files", "paths": [str(folder / name)]}
        )
    own = ["data.source=python-stdlib", "data.paths=[]", f"island.cache_dir={folder}/cache"]
    return [*SETTINGS, *own, f"data.mixture={json.dumps(mixture)}", f"stages={json.dumps(STAGES)}"]


IN_SHARDS = ["data.order=shards", "data.shard_tokens=256"]


def digests(islands: list[Island]) -> list[str]:
    """Of each round of islands that agree."""
    found = [
        [record["digest"] for _, record in sorted(island.committed().items())] for island in islands
    ]
    assert all(each == found[0] for each in found)
    return found[0]


def prepare(config: Config, *arguments: str) -> None:
    """Run `diloco prepare` with a config."""
    path = Path(config.island.cache_dir).parent / "prepared.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "diloco", "prepare", str(path), *arguments]
    subprocess.run(command, cwd=ROOT, check=True, timeout=GUARD_SECONDS, stdout=subprocess.DEVNULL)


def at_store(folder: Path) -> str:
    """The setting of a mixture whose sources are in a store."""
    names = ("code", "prose")
    entries = [
        {"name": name, "weight": 1, "source": "shards", "paths": [str(folder / name)]}
        for name in names
    ]
    return f"data.mixture={json.dumps(entries)}"


def die_after(steps: int, config: Config, index: int) -> None:
    """Train until the process kills itself in its inner step `steps`, once the others are in it,
    too.
    """

    def killed(parts: Runtime) -> None:
        kill_in_step(
            steps,
            parts,
            lambda: come_together(Path(parts.island.run_dir), index, len(config.islands)),
        )
        live(parts)

    train(config, index, killed)


def check_stages(island: Island) -> None:
    """Check that the stages began where they should, on what they should."""
    steps = {record["step"]: record for record in island.records("step")}
    for step, tokens in FIRST_STEPS.items():
        assert sum(steps[step]["source_tokens"].values()) == tokens
    assert steps[6]["source_tokens"] == {"code": 256, "prose": 0}
    assert [steps[step]["lr"] for step in (4, 8, 9)] == pytest.approx([0.01, 0.01, 0.002])
    assert [text.split(":")[0].split(" from")[0] for text in island.events("stage")][-1] == "3 of 3"


MESHES = [{"ranks": 2, "mesh": {"pp": 2}}, {"ranks": 2, "mesh": {"cp": 2}}]


@pytest.mark.parametrize("meshes", [[{}, {}], MESHES], ids=["one process each", "pp and cp"])
def test_stages_change_together_and_go_on_bit_for_bit_after_a_kill(
    meshes: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = staged(tmp_path)
    with swarm(tmp_path / "whole", *settings, islands=meshes) as made:
        whole = made.run_all()
        check_stages(whole[0])
        last = whole[1].committed()[5]
        account = data_account(read_run(whole[0].folder.parent).islands)
    assert (account["units_trained"], account["units_repeated"]) == (24, 0)
    with swarm(tmp_path / "broken", *settings, islands=meshes) as made:
        for island in made.start_all(lambda config, index: die_after(7, config, index)):
            assert set(island.wait()) == {-signal.SIGKILL}
        broken = made.run_all()
        assert broken[0].events("resumed")
        check_stages(broken[0])
        assert broken[0].committed()[5]["digest"] == last["digest"]


@pytest.mark.slow
def test_stages_of_text_in_shards_end_alike_tokenised_prepared_fetched_and_after_a_kill(
    tmp_path: Path,
) -> None:
    settings, store = [*staged(tmp_path), *IN_SHARDS], tmp_path / "store"
    with swarm(tmp_path / "tokenised", *settings, islands=[{}, {}]) as made:
        tokenised = made.run_all()
        check_stages(tokenised[0])
        expected = digests(tokenised)
        assert data_account(read_run(tokenised[0].folder.parent).islands)["units_repeated"] == 0
        prepare(made.config, f"island.cache_dir={tmp_path}/prepared")
        prepare(made.config, "--into", str(store))
    for name, place in (("prepared", []), ("fetched", [at_store(store)])):
        cache = f"island.cache_dir={tmp_path}/{name}"
        with swarm(tmp_path / f"{name}-run", *settings, *place, cache, islands=[{}, {}]) as made:
            assert digests(made.run_all()) == expected
    with swarm(
        tmp_path / "broken", *settings, f"island.cache_dir={tmp_path}/own", islands=[{}, {}]
    ) as made:
        for island in made.start_all(lambda config, index: die_after(7, config, index)):
            assert island.wait() == [-signal.SIGKILL]
        assert digests(made.run_all()) == expected


@pytest.mark.slow
def test_a_joiner_enters_in_the_stage_of_the_others(tmp_path: Path) -> None:
    settings = [*staged(tmp_path), "outer.rounds=40", "outer.quorum=1", "outer.start_islands=2"]
    with swarm(tmp_path / "run", *settings, islands=[{}, {}, {"joins": True}]) as made:
        first, second = made.start(0), made.start(1)
        first.wait_for_round(4)
        joiner = made.start(2)
        for island in (first, second, joiner):
            island.finish()
        assert [text.split(" from")[0] for text in joiner.events("stage")] == ["3 of 3"]
        assert joiner.committed()[39]["digest"] == first.committed()[39]["digest"]
        account = data_account(read_run(first.folder.parent).islands)
    assert account["units_repeated"] == 0
