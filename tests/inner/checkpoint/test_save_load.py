"""A training state saved on one mesh and loaded on another is the same bits and trains on alike."""

import hashlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from inner.checkpoint.save_load import Checkpoints, _on_device
from inner.checkpoint.state import live_tensors
from inner.config import ParallelConfig
from inner.mesh import Degrees
from inner.model.sizes import ModelSizes
from inner.threads import Worker
from inner.trainer import Trainer
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, batch, build_trainer, share

# Tied tables at both ends of the pipeline. 61 tokens and heads of 8 columns do not divide over 3
# ranks.
SIZES = ModelSizes(
    dim=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=48,
    vocab_size=61,
    qk_norm=True,
    tie_embeddings=True,
)
# NorMuon and AdamW have different states for different parameters: like the parameter, a number for
# each row, or one.
MUON = OPTIMIZER.model_copy(update={"name": "muon", "muon_row_beta": 0.9})
STEPS_BEFORE, STEPS_AFTER = 1, 2


@dataclass(frozen=True)
class Mesh:
    degrees: Degrees
    micro_batch: int = 3
    schedule: str = "1f1b"

    def build(self, **changes: Any) -> Trainer:
        parallel = ParallelConfig.model_validate({"schedule": self.schedule})
        return build_trainer(
            self.degrees,
            **{
                "sizes": SIZES,
                "config": MUON,
                "parallel": parallel,
                "micro_batch": self.micro_batch,
            }
            | changes,
        )


MESHES = {
    "one": Mesh(Degrees()),
    "dp_shard2": Mesh(Degrees(dp_shard=2)),
    "dp_shard3": Mesh(Degrees(dp_shard=3), micro_batch=2),
    "dp_shard4": Mesh(Degrees(dp_shard=4)),
    "dp_replicate2-dp_shard2": Mesh(Degrees(dp_replicate=2, dp_shard=2)),
    "dp_shard2-tp2": Mesh(Degrees(dp_shard=2, tp=2)),
    "pp2-zbv-dp_replicate2": Mesh(Degrees(pp=2, dp_replicate=2), schedule="zbv"),
    "pp2-cp2": Mesh(Degrees(pp=2, cp=2)),
}
# Every mesh loads its own checkpoints and those of these: shards and replicas, matrices split
# twice, stages.
SLOW = ["dp_shard2", "dp_shard3", "dp_shard4", "dp_replicate2-dp_shard2", "pp2-cp2"]
SAVED = ["dp_replicate2-dp_shard2", "dp_shard2-tp2", "pp2-zbv-dp_replicate2"]


def sources(loaded: str) -> list[str]:
    return list(dict.fromkeys([loaded, *SAVED]))


def digests(trainer: Trainer) -> dict[str, str]:
    """A hash of every whole parameter and optimizer state of the island, the same wherever it is
    held.
    """
    mine: dict[str, set[str]] = {}
    for name, copies in live_tensors(trainer.model_parts, trainer.optimizers).items():
        for tensor in copies:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            mine.setdefault(name, set()).add(hashlib.sha256(whole.numpy().tobytes()).hexdigest())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    merged: dict[str, set[str]] = {}
    for one in everyone:
        for name, hashes in one.items():
            merged.setdefault(name, set()).update(hashes)
    assert all(len(hashes) == 1 for hashes in merged.values()), merged
    return {name: hashes.pop() for name, hashes in merged.items()}


def losses(trainer: Trainer, num_steps: int) -> list[float | None]:
    """Of the next steps; which data a step reads depends on its number."""
    return [trainer.step(share(trainer, batch(trainer.inner_step))).loss for _ in range(num_steps)]


def run(fn: Callable[..., Any], mesh: Mesh, *args: Any) -> list[Any]:
    """Results of fn(rank, *args) on each rank of the mesh."""
    return run_ranks(fn, mesh.degrees.num_ranks, *args, timeout_seconds=600)


def open_checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(folder, keep=2, timeout_seconds=60)


@dataclass
class Saved:
    """The state that a mesh saved, and the losses when it went on without a stop."""

    digests: dict[str, str]
    losses: list[float | None]


@dataclass
class Life:
    """What a mesh made of what others saved, by their names."""

    digests: dict[str, dict[str, str]]
    losses: dict[str, list[float | None]]
    steps: dict[str, int]
    facts: dict[str, Any]


def saved_on_a_rank(rank: int, mesh: Mesh, folder: Path) -> Saved:
    trainer = mesh.build()
    losses(trainer, STEPS_BEFORE)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(trainer, {"degrees": str(mesh.degrees)})
    result = Saved(digests(trainer), losses(trainer, STEPS_AFTER))
    checkpoints.wait(60)
    return result


def loaded_on_a_rank(rank: int, name: str, folder: Path) -> Life:
    life = Life({}, {}, {}, {})
    mesh = MESHES[name]
    for saved in sources(name):
        trainer = mesh.build(seed=99)
        checkpoints = open_checkpoints(folder / saved)
        found = checkpoints.newest()
        assert found is not None
        life.facts[saved] = checkpoints.load(trainer, found)
        life.steps[saved] = trainer.inner_step
        life.digests[saved] = digests(trainer)
        life.losses[saved] = losses(trainer, STEPS_AFTER)
        checkpoints.close()
    return life


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a folder of checkpoints of each mesh."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Callable[[str], Saved]:
    """What a mesh saved."""

    @cache
    def saved_by(name: str) -> Saved:
        return run(saved_on_a_rank, MESHES[name], MESHES[name], folder / name)[0]

    return saved_by


@pytest.fixture(scope="module")
def loaded(folder: Path, saved: Callable[[str], Saved]) -> Callable[[str], Life]:
    """What a mesh made of what others saved."""

    @cache
    def loaded_by(name: str) -> Life:
        for source in sources(name):
            saved(source)
        return run(loaded_on_a_rank, MESHES[name], name, folder)[0]

    return loaded_by


each_pair = pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            (source, target),
            marks=[pytest.mark.slow] if target in SLOW else [],
            id=f"{source}->{target}",
        )
        for target in MESHES
        for source in sources(target)
    ],
)


@each_pair
def test_loaded_state_is_the_saved_one_bit_for_bit(saved, loaded, pair: tuple[str, str]) -> None:
    source, target = pair
    assert loaded(target).digests[source] == saved(source).digests
    assert loaded(target).steps[source] == STEPS_BEFORE
    assert loaded(target).facts[source] == {"degrees": str(MESHES[source].degrees)}


@each_pair
def test_training_goes_on_as_if_it_had_not_stopped(saved, loaded, pair: tuple[str, str]) -> None:
    source, target = pair
    expected = saved(source).losses
    if source == target:
        assert loaded(target).losses[source] == expected
    else:
        assert loaded(target).losses[source] == pytest.approx(expected, rel=1e-5)


def test_saved_names_do_not_depend_on_the_mesh(saved) -> None:
    names = {name: sorted(saved(name).digests) for name in ("one", *SAVED)}
    assert all(held == names["one"] for held in names.values())
    assert "params/embed.weight" in names["one"]
    assert "optimizer/embed.weight/exp_avg_sq" in names["one"]
    assert "optimizer/layers.3.ffn.up_proj.weight/momentum_buffer" in names["one"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "dp_shard2-tp2" else [pytest.mark.slow])
        for name in SAVED
    ],
)
def test_save_and_load_twice_is_the_same_bits(tmp_path: Path, saved, name: str) -> None:
    mesh = MESHES[name]
    for first, second in run(round_trips_on_a_rank, mesh, mesh, tmp_path):
        assert first == second == saved(name).digests


def round_trips_on_a_rank(rank: int, mesh: Mesh, folder: Path) -> list[dict[str, str]]:
    checkpoints = open_checkpoints(folder)
    trainer = mesh.build()
    losses(trainer, STEPS_BEFORE)
    trips = []
    for seed in (5, 6):
        checkpoints.save(trainer, {}, wait=True)
        trainer = mesh.build(seed=seed)
        checkpoints.load(trainer, checkpoints.at(STEPS_BEFORE))
        trips.append(digests(trainer))
    return trips


# A save in the background.


def test_what_changes_after_save_returns_is_not_saved(tmp_path: Path) -> None:
    for before, after, loaded in run_ranks(changed_on_a_rank, 2, tmp_path):
        assert before == loaded
        assert before != after


def changed_on_a_rank(rank: int, folder: Path) -> list[dict[str, str]]:
    """Holds every file up until all of the state has changed."""
    is_about_to_write, may_write = threading.Event(), threading.Event()

    def hold_up(event: str, args: tuple) -> None:
        is_created = event == "open" and "x" in (args[1] or "")
        if is_created and str(args[0]).endswith(".tensors"):
            is_about_to_write.set()
            assert may_write.wait(60)

    sys.addaudithook(hold_up)
    mesh = MESHES["dp_shard2"]
    trainer = mesh.build()
    losses(trainer, 1)
    before = digests(trainer)
    checkpoints = open_checkpoints(folder)
    checkpoints.save(trainer, {})
    assert is_about_to_write.wait(60)
    with pytest.raises(TimeoutError, match="still being written"):
        checkpoints.wait(0.01)
    losses(trainer, 1)
    after = digests(trainer)
    may_write.set()
    checkpoints.wait(60)
    checkpoints.load(trainer, checkpoints.at(1))
    return [before, after, digests(trainer)]


def test_the_writing_thread_s_current_device_is_the_trainer_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = list[int | None]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(device.index))
    worker = Worker("checkpoint")
    worker.submit(lambda: _on_device(lambda: None, torch.device("cuda:3"))).result(60)
    worker.submit(lambda: _on_device(lambda: None, torch.device("cpu"))).result(60)
    worker.close()
    assert devices == [3], "once, on the worker, and not for the CPU"


def test_second_save_waits_for_the_first(tmp_path: Path) -> None:
    assert run_ranks(two_saves_on_a_rank, 2, tmp_path) == [[1, 2], [1, 2]]


def two_saves_on_a_rank(rank: int, folder: Path) -> list[int]:
    trainer = MESHES["dp_shard2"].build()
    checkpoints = open_checkpoints(folder)
    for _ in range(2):
        losses(trainer, 1)
        checkpoints.save(trainer, {})
    return [checkpoints.at(step).inner_step for step in (1, 2)]
