"""Multi-token prediction: what the extra depths compute, by the formula, and what they leave
alone.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from inner.checkpoint.save_load import Checkpoints
from inner.config import ModelConfig, ParallelConfig, PredictConfig
from inner.data.chat.coding import CONTEXT
from inner.data.micro_batch import Cutter, num_targets
from inner.errors import InputError
from inner.measure.param_specs import num_active, num_elements, param_specs
from inner.mesh import Degrees
from inner.model.generate import Sampling, generate
from inner.model.predict import recording_depths
from inner.model.single_process import build_whole_model, summed_loss
from inner.model.sizes import PRESETS, ModelSizes
from inner.model.transformer import Transformer
from inner.optim.build import build_optimizers
from inner.optim.muon.muon import Muon
from inner.parallel.context.build import rank_positions
from inner.trainer import StepResult, Trainer
from tests.harness import run_ranks
from tests.inner.folders import spread_model, tensors_of
from tests.inner.small import OPTIMIZER, SEQ_LEN, batch, build_trainer, share, whole_model

EOS = 7
DEPTHS = 2
WEIGHT = 0.4
PREDICT = PredictConfig(depths=DEPTHS, weight=WEIGHT)
PLAIN = ModelSizes(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=61)
SIZES = replace(PLAIN, predict=PREDICT)
TIED = replace(SIZES, tie_embeddings=True)
DOCUMENTS = torch.tensor([[1, 5, EOS, 9, 9, 8, EOS, 3, 2], [4, 4, 4, 4, 4, 4, 4, -100, -100]])
"""Two windows of 8 positions. The second ends with padding."""


def windows_of(count: int = 3) -> Tensor:
    """Windows with padding at the end, and an end of a document in each."""
    windows = batch(0)[:count].clone()
    windows[:, 5] = EOS
    return windows


def norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor) -> Tensor:
    """RoPE of heads (S, H, E)."""
    (length, _, size) = x.shape
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    (first, second) = x.chunk(2, dim=-1)
    (cos, sin) = (angles.cos()[:, None], angles.sin()[:, None])
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def block(w: dict[str, Tensor], number: int, x: Tensor, is_seen: Tensor) -> Tensor:
    """One layer of a sequence x (S, D), with attention where `is_seen` (S, S) says so."""
    name = f"layers.{number}."
    read = norm(x, w[name + "attention_norm.weight"])
    (q, k, v) = (
        (read @ w[f"{name}attention.{one}_proj.weight"].T).unflatten(-1, (-1, 8)) for one in "qkv"
    )
    (q, k) = (turn(q), turn(k).repeat_interleave(2, dim=1))
    scores = torch.einsum("she,the->hst", q, k) / math.sqrt(8)
    weights = scores.masked_fill(~is_seen, -math.inf).softmax(-1)
    mixed = torch.einsum("hst,the->she", weights, v.repeat_interleave(2, dim=1)).flatten(-2)
    x = x + mixed @ w[name + "attention.out_proj.weight"].T
    read = norm(x, w[name + "ffn_norm.weight"])
    hidden = F.silu(read @ w[name + "ffn.gate_proj.weight"].T) * (
        read @ w[name + "ffn.up_proj.weight"].T
    )
    return x + hidden @ w[name + "ffn.down_proj.weight"].T


def losses_by_hand(
    w: dict[str, Tensor], window: list[int], *, masks_documents: bool
) -> list[tuple[Tensor, int]]:
    """The summed cross-entropy and the number of targets of the next token, then of each depth."""
    length = len(window) - 1
    tokens = [max(token, 0) for token in window]
    document = [
        window[:position].count(EOS) if masks_documents else 0 for position in range(length)
    ]
    is_seen = torch.tensor(
        [[a >= b and document[a] == document[b] for b in range(length)] for a in range(length)]
    )
    head = w.get("head.weight", w["embed.weight"])
    x = w["embed.weight"][tokens[:length]]
    for number in range(2):
        x = block(w, number, x, is_seen)
    read = norm(x, w["norm.weight"])
    found = []
    for depth in range(DEPTHS + 1):
        if depth:
            joint = f"layers.{1 + depth}.joint."
            # Past the end any token will do, because nothing is learned there and no position after
            # it exists.
            ahead = [tokens[min(position + depth, length - 1)] for position in range(length)]
            both = norm(w["embed.weight"][ahead], w[joint + "token_norm.weight"])
            both = torch.cat((both, norm(read, w[joint + "stream_norm.weight"])), dim=-1)
            x = block(w, 1 + depth, both @ w[joint + "proj.weight"].T, is_seen)
            read = norm(x, w[joint + "norm.weight"])
        logits = (read @ head.T).log_softmax(-1)
        learns = [
            position
            for position in range(length - depth)
            if document[position] == document[position + depth]
            and window[position + depth + 1] >= 0
        ]
        total = sum(
            (-logits[position, window[position + depth + 1]] for position in learns),
            torch.zeros(()),
        )
        found.append((total, len(learns)))
    return found


@pytest.mark.parametrize("eos_id", [None, EOS], ids=["across documents", "within documents"])
@pytest.mark.parametrize("sizes", [SIZES, TIED], ids=["own head", "tied"])
def test_losses_and_gradients_are_those_of_the_formula(
    sizes: ModelSizes, eos_id: int | None
) -> None:
    model = spread_model(sizes, seq_len=SEQ_LEN).requires_grad_(True)
    windows = windows_of()
    made = Cutter(torch.arange(SEQ_LEN), SEQ_LEN, eos_id, num_depths=DEPTHS)(windows)
    scale = 1 / num_targets(windows)
    with recording_depths([model], DEPTHS, torch.device("cpu")) as sums_2P:
        loss = model(
            made.tokens_BS, targets_BS=made.targets_BS, packing=made.packing, ahead=made.ahead
        )
    (loss * scale).backward()

    weights = {
        name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()
    }
    by_row = [
        losses_by_hand(weights, row, masks_documents=eos_id is not None) for row in windows.tolist()
    ]
    totals = [torch.stack([row[depth][0] for row in by_row]).sum() for depth in range(DEPTHS + 1)]
    counts = [sum(row[depth][1] for row in by_row) for depth in range(DEPTHS + 1)]
    torch.autograd.backward([scale * (totals[0] + WEIGHT / DEPTHS * (totals[1] + totals[2]))])
    (main, *others) = [total.item() for total in totals]
    assert loss.item() == pytest.approx(main, rel=1e-5)
    assert sums_2P[0].tolist() == pytest.approx(others, rel=1e-5)
    assert (num_targets(windows), *sums_2P[1].tolist()) == tuple(counts)
    for name, param in model.named_parameters():
        expected = weights[name].grad
        assert param.grad is not None and expected is not None
        torch.testing.assert_close(
            param.grad, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name} {text}"
        )


def test_a_depth_reads_and_learns_what_is_in_its_document_and_sequence() -> None:
    made = Cutter(torch.arange(8), 8, EOS, num_depths=2)(DOCUMENTS).ahead
    assert made is not None
    no = -100
    assert made.tokens_PBS[0].tolist() == [
        [5, EOS, no, 9, 8, EOS, no, no],
        [4, 4, 4, 4, 4, 4, no, no],
    ]
    assert made.targets_PBS[0].tolist() == [
        [EOS, 9, no, 8, EOS, 3, no, no],
        [4, 4, 4, 4, 4, no, no, no],
    ]
    assert made.tokens_PBS[1].tolist() == [
        [EOS, no, no, 8, EOS, no, no, no],
        [4, 4, 4, 4, 4, no, no, no],
    ]
    assert made.targets_PBS[1].tolist() == [
        [9, no, no, EOS, 3, no, no, no],
        [4, 4, 4, 4, no, no, no, no],
    ]


def test_without_a_document_mask_a_depth_reads_on() -> None:
    made = Cutter(torch.arange(8), 8, None, num_depths=1)(DOCUMENTS).ahead
    assert made is not None
    assert made.tokens_PBS[0, 0].tolist() == [5, EOS, 9, 9, 8, EOS, 3, -100]
    assert made.targets_PBS[0, 0].tolist() == [EOS, 9, 9, 8, EOS, 3, 2, -100]


def test_what_is_only_read_is_no_target_of_a_depth() -> None:
    window = torch.tensor([[CONTEXT - 3, CONTEXT - 4, 5, 6, CONTEXT - 7]])
    made = Cutter(torch.arange(4), 4, None, num_depths=1)(window).ahead
    assert made is not None
    assert made.tokens_PBS[0].tolist() == [[4, 5, 6, -100]]
    assert made.targets_PBS[0].tolist() == [[5, 6, -100, -100]]


@pytest.mark.parametrize("eos_id", [None, EOS])
def test_a_rank_with_some_positions_sees_tokens_that_other_ranks_hold(eos_id: int | None) -> None:
    whole = Cutter(torch.arange(8), 8, eos_id, num_depths=2)(DOCUMENTS).ahead
    for method in ("ring", "ulysses"):
        for rank in range(2):
            positions = rank_positions(method, 8, 2, rank)
            here = Cutter(positions, 8, eos_id, num_depths=2)(DOCUMENTS).ahead
            assert here is not None and whole is not None
            assert torch.equal(here.tokens_PBS, whole.tokens_PBS[..., positions])
            assert torch.equal(here.targets_PBS, whole.targets_PBS[..., positions])


def test_generation_and_evaluation_are_those_of_the_model_without_depths() -> None:
    model = spread_model(SIZES)
    tensors = tensors_of(model)
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(("layers.2.", "layers.3."))
    }
    assert len(plain) < len(tensors)
    texts = []
    losses = []
    for sizes, weights in ((SIZES, tensors), (PLAIN, plain)):
        built = build_whole_model(sizes, weights, 32, "cpu")
        texts.append(
            list(generate(built, [1, 2, 3], 8, Sampling(temperature=0), torch.Generator()))
        )
        losses.append(summed_loss(built, [windows_of()], SEQ_LEN, EOS))
    assert texts[0] == texts[1]
    assert losses[0] == losses[1]


def trained_on_a_rank(
    rank: int, degrees: Degrees, sizes: ModelSizes, changes: dict
) -> tuple[list[StepResult], tuple[float, int], dict[str, Tensor]]:
    trainer = build_trainer(degrees, sizes, OPTIMIZER.model_copy(update=changes), micro_batch=3)
    heldout = trainer.evaluate([batch(1000)[:3]])
    steps = [trainer.step(share(trainer, batch(step))) for step in range(3)]
    return steps, heldout, whole_model(trainer.params)[0]


def trained(
    sizes: ModelSizes, changes: dict | None = None
) -> tuple[list[StepResult], tuple[float, int], dict]:
    return run_ranks(trained_on_a_rank, 1, Degrees(), sizes, changes or {})[0]


def test_depths_report_losses_of_their_own_and_the_reported_loss_is_that_of_the_next_token() -> (
    None
):
    (with_depths, heldout, _) = trained(SIZES)
    (without, same_heldout, _) = trained(PLAIN)
    assert heldout == same_heldout
    assert with_depths[0].loss == without[0].loss
    assert with_depths[1].loss != without[1].loss, "the depths' gradients change the step"
    assert all(step.depth_losses == () for step in without)
    for step in with_depths:
        assert len(step.depth_losses) == DEPTHS
        assert all(loss == pytest.approx(step.loss, abs=0.5) for loss in step.depth_losses)


def test_without_weight_the_depths_change_no_other_weight() -> None:
    sizes = replace(SIZES, predict=PREDICT.model_copy(update={"weight": 0.0}))
    no_clipping = {"clip_norm": None}
    with_depths = trained(sizes, no_clipping)[2]
    without = trained(PLAIN, no_clipping)[2]
    for name, values in without.items():
        torch.testing.assert_close(with_depths[name], values, rtol=0, atol=1e-6)


def test_measuring_the_noise_scale_counts_no_loss_twice() -> None:
    (plain, _, weights) = trained(SIZES)
    (measured, _, same_weights) = trained(SIZES, {"noise_scale_every": 1})
    assert [step.depth_losses for step in measured] == [step.depth_losses for step in plain]
    assert all(step.noise is not None for step in measured)
    assert all(torch.equal(same_weights[name], values) for name, values in weights.items())


def test_muon_takes_the_matrices_of_depths() -> None:
    model = spread_model(SIZES).requires_grad_(True)
    names = [name for name, _ in model.named_parameters()]
    optimizers = build_optimizers([model], names, OPTIMIZER.model_copy(update={"name": "muon"}))
    taken = {
        id(param)
        for each in optimizers
        if isinstance(each, Muon)
        for group in each.param_groups
        for param in group["params"]
    }
    of_depth = {
        name: param for name, param in model.named_parameters() if name.startswith("layers.2.")
    }
    assert {name for name, param in of_depth.items() if id(param) in taken} == {
        name for name, param in of_depth.items() if param.ndim == 2
    }
    assert "layers.2.joint.proj.weight" in of_depth


def checkpoint_on_a_rank(
    rank: int, degrees: Degrees, folder: Path, is_saved: bool
) -> dict[str, Tensor]:
    parallel = ParallelConfig(schedule="zbv")
    trainer = build_trainer(
        degrees, LAYERED, OPTIMIZER, parallel, micro_batch=3, seed=7 if is_saved else 99
    )
    checkpoints = Checkpoints(folder, keep=2, timeout_seconds=60)
    if is_saved:
        step(trainer)
        checkpoints.save(trainer, {}, wait=True)
    else:
        found = checkpoints.newest()
        assert found is not None
        checkpoints.load(trainer, found)
    checkpoints.close()
    step(trainer)
    return whole_model(trainer.params)[0]


LAYERED = replace(SIZES, num_layers=4)


def step(trainer: Trainer) -> None:
    trainer.step(share(trainer, batch(trainer.inner_step)))


def test_a_mesh_goes_on_from_what_another_saved(tmp_path: Path) -> None:
    saved = run_ranks(checkpoint_on_a_rank, 2, Degrees(pp=2), tmp_path, True)[0]
    loaded = run_ranks(checkpoint_on_a_rank, 2, Degrees(dp_shard=2), tmp_path, False)[0]
    assert saved.keys() == loaded.keys()
    for name, values in saved.items():
        torch.testing.assert_close(loaded[name], values, rtol=1e-4, atol=1e-5)


def test_counts_of_parameters_include_the_depths() -> None:
    sizes = replace(PRESETS["deepseek-v3"], predict=PredictConfig(depths=1))
    without = num_elements(param_specs(PRESETS["deepseek-v3"]))
    assert without == 671_026_404_352
    # One layer with experts, three norms, and the matrix that joins token and stream.
    layer = sum(
        math.prod(spec.shape)
        for spec in param_specs(PRESETS["deepseek-v3"])
        if spec.name.startswith("layers.60.")
    )
    assert (
        num_elements(param_specs(sizes))
        == without + layer + 3 * 7168 + 2 * 7168**2
        == 682_636_472_320
    )
    assert num_active(sizes) == num_active(PRESETS["deepseek-v3"])


@pytest.mark.parametrize(
    "sizes",
    [SIZES, TIED, replace(PRESETS["1m-experts"], predict=PREDICT)],
    ids=["own", "tied", "experts"],
)
def test_specs_have_the_models_own_names_shapes_and_order(sizes: ModelSizes) -> None:
    with torch.device("meta"):
        model = Transformer(sizes, torch.arange(8))
    named = tensors_of(model)
    assert [(spec.name, spec.shape) for spec in param_specs(sizes)] == [
        (n, tuple(t.shape)) for n, t in named.items()
    ]


@pytest.mark.parametrize(
    "values", [{"depths": 0}, {"depths": -1}, {"depths": 65}, {"depths": 1, "weight": -0.1}, {}]
)
def test_depths_and_weights_that_make_no_sense_are_refused(values: dict) -> None:
    with pytest.raises(ValidationError, match=r"predict\.(depths|weight)"):
        ModelConfig.model_validate({"preset": "1m", "predict": values})


def test_an_own_model_has_no_depths_of_ours() -> None:
    with pytest.raises(ValidationError, match="predict: for the built-in model only"):
        ModelConfig.model_validate({"name": "tests.own.models:GatedConv", "predict": {"depths": 1}})


def too_deep_on_a_rank(rank: int) -> str:
    sizes = replace(SIZES, predict=PredictConfig(depths=SEQ_LEN))
    with pytest.raises(InputError) as caught:
        build_trainer(Degrees(dp_shard=2), sizes)
    return str(caught.value)


def test_more_depths_than_a_sequence_has_targets_are_refused_on_every_rank() -> None:
    for message in run_ranks(too_deep_on_a_rank, 2):
        assert "model.predict.depths (16) must be less than data.seq_len (16)" in message
