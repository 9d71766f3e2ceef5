"""Any mesh trains like one process: one life of 20 AdamW steps on each mesh, then one claim a test."""

import hashlib
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inner.params import ParamSpec
from inner.trainer import StepResult
from tests.harness import run_ranks
from tests.inner.small import OPTIMIZER, SIZES, batch, build_trainer, share, snapshot, whole_model

STEPS = 20
MESHES = {"one": (1, 1), "fsdp2": (1, 2), "replicate2": (2, 1), "fsdp3": (1, 3), "fsdp4": (1, 4), "hsdp2x2": (2, 2)}
OTHERS = [name for name in MESHES if name != "one"]


@dataclass
class Life:
    """What one rank saw."""

    specs: list[ParamSpec]
    theta0: dict[str, Tensor]
    holders: dict[str, Tensor]
    first_pieces: list[Tensor]
    first_eval: tuple[float, int]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    steps: list[StepResult] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    last_pieces: list[Tensor] = field(default_factory=list)
    is_in_place: bool = False


def live(rank: int, degrees: tuple[int, int]) -> Life:
    num_ranks = math.prod(degrees)
    # Clipping is tested by the norm; unclipped gradients can be compared with one another.
    config = OPTIMIZER.model_copy(update={"clip_norm": None})
    trainer = build_trainer(degrees, config=config, micro_batch=2 if num_ranks == 3 else 3)
    params = trainer.params
    assert (trainer.data_rank, trainer.num_data_ranks) == (rank, num_ranks)
    theta0, holders = whole_model(params)
    heldout = [batch(1000 + number)[:4] for number in range(5)]
    addresses = [params.read(index).data_ptr() for index in range(len(params.slices))]
    life = Life(params.specs, theta0, holders, snapshot(params), trainer.evaluate(heldout[rank::num_ranks]))

    def keep_gradients(*_: object) -> None:
        if not life.gradients:
            for name, param in trainer.model.named_parameters():
                assert isinstance(param.grad, DTensor)
                life.gradients[name] = param.grad.full_tensor()

    register_optimizer_step_pre_hook(keep_gradients)
    for step in range(STEPS):
        micro_batches = share(trainer, batch(step))
        assert len(micro_batches) == trainer.micro_batches_per_step
        life.steps.append(trainer.step(micro_batches))
    life.final, _ = whole_model(params)
    life.last_pieces = snapshot(params)
    life.is_in_place = addresses == [params.read(index).data_ptr() for index in range(len(params.slices))]
    return life


@pytest.fixture(scope="module")
def lives() -> dict[str, list[Life]]:
    return {name: run_ranks(live, math.prod(degrees), degrees) for name, degrees in MESHES.items()}


def digest(values: dict[str, Tensor]) -> str:
    state = hashlib.sha256()
    for name, tensor in values.items():
        state.update(name.encode() + tensor.numpy().tobytes())
    return state.hexdigest()


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        error = float((got[name] - values).abs().max() / values.abs().max())
        assert error < tolerance, f"{name}: {error}"


def test_training_learns(lives: dict[str, list[Life]]) -> None:
    first, last = lives["one"][0].steps[0].loss, lives["one"][0].steps[-1].loss
    assert first is not None and last is not None
    assert last < first - 0.3


@pytest.mark.parametrize("name", OTHERS)
def test_initial_weights_are_the_same_bits(lives: dict[str, list[Life]], name: str) -> None:
    assert {digest(life.theta0) for life in lives[name]} == {digest(lives["one"][0].theta0)}


@pytest.mark.parametrize("name", ["fsdp2", "fsdp4"])
def test_no_two_shards_hold_the_same_numbers(lives: dict[str, list[Life]], name: str) -> None:
    embeddings = [life.first_pieces[0] for life in lives[name]]
    rows = min(piece.shape[0] for piece in embeddings)
    for rank, piece in enumerate(embeddings):
        assert not any(torch.equal(piece[:rows], other[:rows]) for other in embeddings[:rank])


@pytest.mark.parametrize("name", MESHES)
def test_slices_of_a_replica_cover_the_model_exactly_once(lives: dict[str, list[Life]], name: str) -> None:
    replicas, _ = MESHES[name]
    for life in lives[name]:
        assert all(bool((holders == replicas).all()) for holders in life.holders.values())


@pytest.mark.parametrize("name", OTHERS)
def test_specs_are_the_same_on_every_rank_of_every_mesh(lives: dict[str, list[Life]], name: str) -> None:
    assert all(life.specs == lives["one"][0].specs for life in lives[name])
    assert len(lives["one"][0].specs) == 2 + 11 * SIZES.num_layers + 1


@pytest.mark.parametrize("name", MESHES)
def test_training_never_moves_a_parameter_in_memory(lives: dict[str, list[Life]], name: str) -> None:
    assert all(life.is_in_place for life in lives[name])


@pytest.mark.parametrize("name", OTHERS)
def test_every_gradient_equals_one_process(lives: dict[str, list[Life]], name: str) -> None:
    assert len(lives[name][0].gradients) == len(lives["one"][0].specs)
    assert_close(lives[name][0].gradients, lives["one"][0].gradients, 1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_loss_and_gradient_norm_equal_one_process(lives: dict[str, list[Life]], name: str) -> None:
    for got, expected in zip(lives[name][0].steps, lives["one"][0].steps, strict=True):
        assert (got.step, got.tokens, got.lr) == (expected.step, expected.tokens, expected.lr)
        assert got.loss == pytest.approx(expected.loss, rel=1e-5)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_weights_after_20_steps_equal_one_process(lives: dict[str, list[Life]], name: str) -> None:
    assert_close(lives[name][0].final, lives["one"][0].final, 1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_every_rank_reports_the_same_step(lives: dict[str, list[Life]], name: str) -> None:
    reports = [[(step.loss, step.grad_norm) for step in life.steps] for life in lives[name]]
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize(("name", "pairs"), [("replicate2", [(0, 1)]), ("hsdp2x2", [(0, 2), (1, 3)])])
def test_replicas_stay_the_same_bits(lives: dict[str, list[Life]], name: str, pairs: list[tuple[int, int]]) -> None:
    for first, second in pairs:
        pieces = zip(lives[name][first].last_pieces, lives[name][second].last_pieces, strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pieces)


@pytest.mark.parametrize("name", OTHERS)
def test_heldout_loss_equals_one_process_with_unequal_shares(lives: dict[str, list[Life]], name: str) -> None:
    loss_sum, tokens = lives["one"][0].first_eval
    for life in lives[name]:
        assert life.first_eval[0] == pytest.approx(loss_sum, rel=1e-6)
        assert life.first_eval[1] == tokens


def test_tokens_are_the_valid_targets(lives: dict[str, list[Life]]) -> None:
    valid = int((batch(0)[:, 1:] >= 0).sum())
    assert lives["one"][0].steps[0].tokens == valid < OPTIMIZER.tokens_per_step
