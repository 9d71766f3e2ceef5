"""Any mesh trains like one process: one life of 20 AdamW steps on each mesh, one claim a test.

Some of up to 4 ranks by default; all of them, up to 16: pytest tests/parity -m "slow or not slow"
"""

import hashlib
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from inner.measure.traffic.expected import expected_traffic
from inner.measure.traffic.experts import RowsMoved
from inner.measure.traffic.rows import merge_axes
from inner.measure.workload import Workload
from inner.model.sizes import ModelSizes
from inner.model.stage import Stage
from inner.parallel.weights.zero_stage import has_whole_weights
from tests.inner.small import OPTIMIZER, batch
from tests.parity.choices import join
from tests.parity.meshes import (
    ALIBI,
    COHERE,
    EOS,
    GEMMA,
    GPT2,
    LATENT,
    MANY_HEADS,
    MIXTURE,
    NEOX,
    OWN,
    PREDICT,
    PREDICT_MIXTURE,
    PREDICT_TIED,
    QWEN,
    SMOLLM,
    STEPS,
    TIED,
    Case,
    Life,
    case,
    of,
)

FEW = [
    case("dp_shard2"),
    case("dp_shard4", TIED),
    case("dp_replicate2 dp_shard2", micro_batch=1),
    case("tp2", micro_batch=6),
    case("cp2", micro_batch=6),
    case("cp2", micro_batch=6, context="all_gather"),
    case("cp2", MANY_HEADS, micro_batch=6, context="ulysses"),
    case("pp2", schedule="interleaved_1f1b"),
    case("pp2", TIED, schedule="zbv"),
    case("pp2 dp_shard2", schedule="breadth_first"),
    case("pp2 tp2", micro_batch=6, schedule="interleaved_zero_bubble"),
    case("pp2 cp2", schedule="zbv", eos_id=EOS),
    case("pp4", TIED),
    case("dp_shard2", QWEN),
    case("tp2", QWEN, micro_batch=6),
    case("pp2", QWEN),
    case("dp_replicate2 dp_shard2", OWN, micro_batch=1, recompute="full"),
    case("dp_shard4", MIXTURE),
    case("pp2 dp_shard2", MIXTURE, schedule="zbv", recompute="full"),
    case("cp2", LATENT, micro_batch=6),
    case("dp_shard2 ep2", MIXTURE),
    case("dp_shard2 tp2 ep2", MIXTURE, micro_batch=6, sequence_parallel=False),
    case("dp_replicate2", TIED, zero=0),
    case("pp2", PREDICT, schedule="zbv"),
    case("cp2", PREDICT, micro_batch=6, eos_id=EOS),
]
FAMILIES = [
    case("dp_shard2", GEMMA),
    case("tp2", GEMMA, micro_batch=6),
    case("cp2", GEMMA, micro_batch=6, eos_id=EOS),
    case("cp2", GEMMA, micro_batch=6, context="all_gather", recompute="full"),
    case("cp2", GEMMA, micro_batch=6, context="ulysses", eos_id=EOS),
    case("pp2", GEMMA, schedule="zbv", recompute="selective"),
    case("dp_shard2 cp2 tp2", GEMMA, recompute="selective"),
    case("dp_shard2", GPT2),
    case("dp_replicate2", GPT2, zero=0),
    case("tp2", GPT2, micro_batch=6),
    case("tp2", GPT2, micro_batch=6, sequence_parallel=False, recompute="full"),
    case("cp2", GPT2, micro_batch=6),
    case("pp2 dp_shard2", GPT2, schedule="interleaved_1f1b"),
    case("dp_shard2", NEOX),
    case("tp2", NEOX, micro_batch=6),
    case("tp4", NEOX, micro_batch=6, sequence_parallel=False),
    case("pp2 cp2", NEOX, schedule="zbv", recompute="full"),
    case("tp2", COHERE, micro_batch=6),
    case("pp2 dp_shard2", COHERE, schedule="breadth_first"),
    case("cp2", ALIBI, micro_batch=6, eos_id=EOS),
    case("cp2 tp2", ALIBI, micro_batch=6, context="all_gather"),
    case("pp2 dp_shard2", ALIBI, schedule="1f1b"),
    case("cp4", SMOLLM, micro_batch=6),
    case(
        "pp2 tp2", SMOLLM, micro_batch=6, schedule="interleaved_zero_bubble", recompute="attention"
    ),
    case("dp_shard2", SMOLLM, eos_id=EOS),
    case("pp2 dp_shard2 cp2 tp2", GEMMA, schedule="interleaved_1f1b", eos_id=EOS),
]
"""Each setting of model.decoder on data, tensor, context and pipeline ranks."""
REST = [
    *FAMILIES,
    case("dp_replicate2 dp_shard2", MIXTURE, recompute="selective"),
    case("cp2", MIXTURE, micro_batch=6, eos_id=EOS),
    case("pp2", MIXTURE, schedule="interleaved_1f1b", recompute="selective"),
    case("pp2", MIXTURE, schedule="dualpipev", micro_batch=2),
    case("pp2 cp2", MIXTURE, schedule="interleaved_zero_bubble", recompute="full"),
    case("pp4", MIXTURE),
    case("pp2 dp_replicate2", MIXTURE, schedule="gpipe", zero=3),
    case("pp2 dp_shard2 cp2", MIXTURE, schedule="breadth_first", micro_batch=1),
    case("dp_shard2 cp2", LATENT, context="all_gather", recompute="full"),
    case("tp2", MIXTURE, micro_batch=6),
    case("tp2", LATENT, micro_batch=6, sequence_parallel=False),
    case("tp2 ep2", MIXTURE, micro_batch=6, recompute="full"),
    case("tp2 ep2", MIXTURE, micro_batch=6, sequence_parallel=False),
    case("dp_replicate2 dp_shard2 ep2", MIXTURE, recompute="selective"),
    case("dp_shard6 ep3", MIXTURE, micro_batch=2),
    case("dp_shard4 ep2", MIXTURE),
    case("cp2 ep2", MIXTURE, micro_batch=6, eos_id=EOS),
    case("dp_shard2 cp2 ep2", MIXTURE, recompute="full"),
    case("pp2 dp_shard2 ep2", MIXTURE, schedule="zbv", recompute="full"),
    case("pp2 dp_shard2 ep2", MIXTURE, schedule="interleaved_zero_bubble"),
    case("pp2 dp_shard2 ep2", MIXTURE, schedule="dualpipev", micro_batch=1),
    case("pp2 dp_shard2 ep2", MIXTURE, schedule="gpipe", zero=3),
    case("pp2 dp_shard2 ep2", MIXTURE, schedule="1f1b", accumulate="whole"),
    case("pp2 dp_shard2 ep2", MIXTURE, schedule="interleaved_1f1b"),
    case("pp2 dp_shard2 ep2", MIXTURE, schedule="breadth_first", recompute="selective"),
    case("pp2 cp2 tp2 ep2", MIXTURE, micro_batch=6, schedule="zbv"),
    case("dp_shard2 cp2 tp2 ep2", MIXTURE, recompute="selective"),
    case("pp2 dp_shard2 cp2 tp2 ep2", MIXTURE, schedule="interleaved_1f1b", eos_id=EOS),
    case("dp_shard2 tp2", LATENT),
    case("pp2 dp_shard2", LATENT, schedule="zbv"),
    case("pp2", PREDICT, schedule="1f1b"),
    case("pp2", PREDICT, schedule="gpipe", recompute="full"),
    case("pp2", PREDICT_TIED, schedule="interleaved_1f1b"),
    case("pp2", PREDICT_MIXTURE, schedule="breadth_first"),
    case("pp2", PREDICT_TIED, schedule="interleaved_zero_bubble"),
    case("pp2 dp_shard2", PREDICT_MIXTURE, schedule="dualpipev", micro_batch=1),
    case("pp2 dp_shard2", PREDICT_TIED, schedule="zbv", recompute="full"),
    case("pp2 tp2", PREDICT_TIED, micro_batch=6, schedule="interleaved_zero_bubble"),
    case("dp_shard2", PREDICT),
    case("dp_replicate2 dp_shard2", PREDICT_MIXTURE, recompute="selective"),
    case("tp2", PREDICT, micro_batch=6),
    case("tp2", PREDICT_MIXTURE, micro_batch=6, sequence_parallel=False),
    case("dp_shard2 cp2", PREDICT, context="all_gather", recompute="full"),
    case("dp_shard2 ep2", PREDICT_MIXTURE),
    case("cp2 ep2", PREDICT_MIXTURE, micro_batch=6, eos_id=EOS),
    case("pp2 dp_shard2 ep2", PREDICT_MIXTURE, schedule="zbv", recompute="full"),
    case("pp2 dp_shard2 cp2 tp2 ep2", PREDICT_MIXTURE, schedule="interleaved_1f1b", eos_id=EOS),
    case("pp2", schedule="interleaved_zero_bubble", recompute="attention"),
    case("cp2", TIED, micro_batch=6, context="all_gather"),
    case("pp2 tp2", TIED, micro_batch=6, schedule="interleaved_zero_bubble"),
    case("dp_shard2 tp2", TIED, micro_batch=6),
    case("tp4", micro_batch=6),
    case("tp4", QWEN, micro_batch=6),
    case("dp_shard2 cp2 tp2", QWEN, recompute="selective"),
    case("cp2 tp2", micro_batch=6, context="all_gather", eos_id=EOS),
    case("dp_replicate2", zero=2),
    case("dp_replicate2", OWN, zero=0, recompute="full"),
    case("cp2", micro_batch=6, zero=3),
    case("dp_replicate2 cp2", TIED, context="all_gather", zero=0, recompute="selective"),
    case("dp_replicate2 tp2", MANY_HEADS, zero=0),
    case("pp2 dp_replicate2", TIED, schedule="gpipe", zero=0),
    case("pp2 dp_replicate2", TIED, schedule="1f1b", zero=0),
    case("pp2 dp_replicate2", schedule="interleaved_1f1b", zero=0),
    case("pp2 dp_replicate2", TIED, schedule="breadth_first", zero=0),
    case("pp2 dp_replicate2", schedule="interleaved_zero_bubble", zero=0),
    case("pp2 dp_replicate2", TIED, schedule="zbv", zero=0),
    case("pp2 dp_replicate2", schedule="dualpipev", micro_batch=1, zero=0),
    case("pp2 dp_replicate2 cp2 tp2", schedule="zbv", zero=0),
    case("dp_shard3", micro_batch=2),
    case("dp_replicate2 dp_shard2"),
    case("dp_shard2", micro_batch=2, accumulate="whole"),
    case("dp_replicate2 dp_shard2", micro_batch=1, accumulate="whole"),
    case("pp2 dp_shard2", TIED, schedule="zbv", micro_batch=1),
    case("pp2 dp_shard2", schedule="interleaved_zero_bubble", micro_batch=1, accumulate="whole"),
    case("pp2 dp_replicate2 dp_shard2", schedule="zbv", micro_batch=1),
    case("tp2", TIED, micro_batch=6, sequence_parallel=False, loss_chunk=7),
    case("cp2", micro_batch=6, eos_id=EOS),
    case("cp2", MANY_HEADS, micro_batch=6, context="ulysses", eos_id=EOS),
    case("cp4", TIED, micro_batch=6),
    case("dp_shard2 cp2"),
    case("pp2"),
    case("pp2", TIED, schedule="gpipe"),
    case("pp2", schedule="dualpipev", micro_batch=2),
    case("pp2 dp_replicate2", TIED, zero=3),
    case("dp_shard2", recompute="full"),
    case("tp2", micro_batch=6, recompute="selective"),
    case("dp_shard2 cp2 tp2", recompute="full"),
    case("dp_replicate2 dp_shard2 tp2", TIED),
    case("dp_replicate2 dp_shard2 cp2", TIED, context="all_gather"),
    case("dp_replicate2 cp2 tp2", MANY_HEADS, context="ulysses", sequence_parallel=False),
    case("pp2 dp_shard2 tp2"),
    case("pp2 dp_replicate2 dp_shard2", TIED, schedule="breadth_first", micro_batch=1),
    case("pp2 dp_shard2 cp2", TIED, schedule="interleaved_1f1b", eos_id=EOS),
    case("pp2 cp2 tp2", TIED, schedule="zbv"),
    case("pp4 tp2", TIED, schedule="1f1b"),
    case("pp2 dp_replicate2 tp4", TIED, schedule="gpipe"),
    case("pp2 dp_shard2 cp2 tp2"),
    case("pp2 dp_shard2 cp2 tp2", TIED, schedule="interleaved_1f1b", eos_id=EOS),
    case(
        "pp2 dp_shard2 cp2 tp2",
        MANY_HEADS,
        schedule="zbv",
        context="ulysses",
        sequence_parallel=False,
    ),
    case(
        "pp2 dp_shard2 cp2 tp2",
        schedule="breadth_first",
        context="all_gather",
        recompute="selective",
    ),
    case("dp_replicate2 dp_shard2 cp2 tp2", TIED),
    case("dp_shard2", compile=True, recompute="full"),
    case("pp2 cp2", schedule="interleaved_1f1b", compile=True),
    case(
        "pp2 dp_replicate2 cp2 tp2",
        schedule="interleaved_zero_bubble",
        recompute="full",
        micro_batch=1,
    ),
]
# Routers near ties: they replay the choices of one process.
NARROW = [
    case("dp_shard2 ep2", MIXTURE, replays=True),
    *(
        pytest.param(other, marks=pytest.mark.slow)
        for other in (
            case("cp2", LATENT, micro_batch=6, replays=True),
            case(
                "dp_shard2 tp2 ep2", MIXTURE, micro_batch=6, sequence_parallel=False, replays=True
            ),
            case("pp2 dp_shard2 ep2", MIXTURE, schedule="zbv", recompute="full", replays=True),
            case("dp_shard2 cp2 tp2 ep2", MIXTURE, recompute="selective", replays=True),
        )
    ),
]
CASES = [*FEW, *NARROW, *(pytest.param(other, marks=pytest.mark.slow) for other in REST)]

on_every_mesh = pytest.mark.parametrize("case", CASES, ids=lambda case: str(case))


def is_mixture(given: Any) -> bool:
    """Whether an entry of CASES has experts."""
    return (given if isinstance(given, Case) else given.values[0]).has_experts


on_every_mixture = pytest.mark.parametrize(
    "case", list(filter(is_mixture, CASES)), ids=lambda case: str(case)
)


def digest(values: dict[str, Tensor]) -> str:
    state = hashlib.sha256()
    for name, tensor in values.items():
        state.update(name.encode() + tensor.numpy().tobytes())
    return state.hexdigest()


def reference(case: Case) -> Life:
    return of(case.reference)[0]


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        error = float((got[name] - values).abs().max() / values.abs().max())
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize(
    "case",
    [
        case("dp_shard2"),
        case("pp4", TIED),
        case("cp2", MANY_HEADS, micro_batch=6, context="ulysses"),
    ],
    ids=["grouped", "tied", "heads"],
)
def test_training_learns(case: Case) -> None:
    life = reference(case)
    first, last = life.steps[0].loss, life.steps[-1].loss
    assert first is not None and last is not None
    assert last < first - 0.3


@on_every_mesh
def test_initial_weights_are_the_same_bits(case: Case) -> None:
    assert digest(of(case)[0].theta0) == digest(reference(case).theta0)


@on_every_mesh
def test_every_gradient_equals_one_process(case: Case) -> None:
    assert_close(of(case)[0].gradients, reference(case).gradients, 1e-5)


@on_every_mesh
def test_first_gradient_norm_equals_one_process(case: Case) -> None:
    assert of(case)[0].steps[0].grad_norm == pytest.approx(
        reference(case).steps[0].grad_norm, rel=1e-6
    )


@on_every_mesh
def test_20_losses_and_norms_equal_one_process(case: Case) -> None:
    for got, expected in zip(of(case)[0].steps, reference(case).steps, strict=True):
        assert (got.step, got.tokens, got.lr) == (expected.step, expected.tokens, expected.lr)
        assert got.loss == pytest.approx(expected.loss, rel=1e-4)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
        assert got.depth_losses == pytest.approx(expected.depth_losses, rel=1e-4)


@on_every_mesh
def test_20_steps_choose_the_experts_that_one_process_chooses(case: Case) -> None:
    for got, expected in zip(of(case)[0].steps, reference(case).steps, strict=True):
        assert (got.routing is None) == (
            not (isinstance(case.sizes, ModelSizes) and case.sizes.experts)
        )
        if got.routing is not None and expected.routing is not None:
            assert (got.routing.layers, got.routing.counts) == (
                expected.routing.layers,
                expected.routing.counts,
            )
            assert got.routing.sequence_loss == pytest.approx(
                expected.routing.sequence_loss, rel=1e-3
            )
            assert got.routing.router_z_loss == pytest.approx(
                expected.routing.router_z_loss, rel=1e-3
            )


@on_every_mixture
def test_every_choice_of_the_first_step_is_that_of_one_process(case: Case) -> None:
    got = join([life.choices for life in of(case)])
    for (step, layer), chosen in join([reference(case).choices]).items():
        assert step > 0 or torch.equal(got[step, layer], chosen), f"layer {layer}"


@on_every_mixture
def test_every_choice_of_20_steps_is_that_of_one_process(case: Case) -> None:
    got = join([life.choices for life in of(case)])
    expected = join([reference(case).choices])
    assert got.keys() == expected.keys()
    assert len(got) == STEPS * len(case.work.sizes.expert_layers)
    for key, chosen in expected.items():
        assert torch.equal(got[key], chosen), f"step and layer {key}"


@pytest.mark.parametrize("case", NARROW, ids=str)
def test_choices_that_would_have_flipped_are_few(case: Case) -> None:
    flipped = sum(life.num_flipped for life in of(case))
    routed = sum(int((chosen[..., 0] >= 0).sum()) for chosen in reference(case).choices.values())
    print(f"{case}: {flipped} of {routed} choices would have been others")
    assert flipped < routed / 100


@on_every_mixture
def test_a_mixture_sends_exactly_what_the_formula_says(case: Case) -> None:
    ranks = of(case)
    for rank, life in enumerate(ranks):
        place = case.degrees.coordinates(rank)
        # Where rows do not divide, the formula is that of the first ranks.
        if any(at for axis, at in place.items() if axis != "pp"):
            continue
        expected = expected_traffic(case.work, place["pp"], partial(count_moved, ranks, rank))
        assert merge_axes(life.traffic, case.degrees) == merge_axes(expected, case.degrees)


def count_moved(ranks: list[Life], rank: int, work: Workload, stage: Stage) -> RowsMoved:
    """The rows that a rank sent and received by the choices of all ranks of its group of ep."""
    ep = work.degrees.ep
    first = rank // ep * ep
    layers = [layer for layer in stage.layers if layer in work.sizes.expert_layers]
    sent = sum(
        sum(ranks[rank].rows_to[layer]) - ranks[rank].rows_to[layer][rank - first]
        for layer in layers
    )
    others = [other for other in range(first, first + ep) if other != rank]
    received = sum(
        ranks[other].rows_to[layer][rank - first] for layer in layers for other in others
    )
    return RowsMoved(sent, received)


@on_every_mesh
def test_weights_after_20_steps_equal_one_process(case: Case) -> None:
    assert_close(of(case)[0].final, reference(case).final, 1e-3)


@on_every_mesh
def test_heldout_loss_equals_one_process_with_unequal_shares(case: Case) -> None:
    loss_sum, tokens = reference(case).heldout
    for life in of(case):
        assert life.heldout[0] == pytest.approx(loss_sum, rel=1e-6)
        assert life.heldout[1] == tokens


@on_every_mesh
def test_every_rank_reports_the_same_step(case: Case) -> None:
    reports = [[(step.loss, step.grad_norm) for step in life.steps] for life in of(case)]
    assert all(report == reports[0] for report in reports)


@on_every_mesh
def test_specs_are_the_same_on_every_rank_of_every_mesh(case: Case) -> None:
    assert all(life.specs == reference(case).specs for life in of(case))


@on_every_mesh
def test_slices_of_a_replica_cover_a_matrix_exactly_once(case: Case) -> None:
    is_whole = has_whole_weights(case.parallel, case.degrees, case.sizes)
    num_replicas = case.degrees.num_copies if is_whole else case.degrees.dp_replicate
    assert all(life.num_holders == {num_replicas} for life in of(case))


@on_every_mesh
def test_training_never_moves_a_parameter_in_memory(case: Case) -> None:
    assert all(life.is_in_place for life in of(case))


@on_every_mesh
def test_ranks_that_hold_the_same_slice_keep_the_same_bits(case: Case) -> None:
    seen: dict[object, Tensor] = {}
    for life in of(case):
        for held, piece in zip(life.slices, life.last_pieces, strict=True):
            assert torch.equal(seen.setdefault(held, piece), piece), held


@pytest.mark.parametrize("case", [case("dp_shard2"), case("dp_shard4", TIED)], ids=str)
def test_no_two_shards_hold_the_same_numbers(case: Case) -> None:
    embeddings = [life.first_pieces[0] for life in of(case)]
    rows = min(piece.shape[0] for piece in embeddings)
    for rank, piece in enumerate(embeddings):
        assert not any(torch.equal(piece[:rows], other[:rows]) for other in embeddings[:rank])


def test_document_mask_changes_the_loss() -> None:
    with_mask, without = reference(case("cp2", eos_id=EOS)), reference(case("cp2"))
    assert not math.isclose(with_mask.heldout[0], without.heldout[0], rel_tol=1e-5)


def test_tokens_are_the_valid_targets() -> None:
    valid = int((batch(0)[:, 1:] >= 0).sum())
    assert reference(case("dp_shard2")).steps[0].tokens == valid < OPTIMIZER.tokens_per_step
