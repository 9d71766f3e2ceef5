"""An own model is refused before a run where it could not train. That it trains is shown in
tests/parity.
"""

import pytest
import torch
import torch.nn.functional as F

from inner.config import ParallelConfig
from inner.data.micro_batch import MicroBatch
from inner.errors import InputError
from inner.mesh import Degrees
from inner.model.sizes import OwnModel
from inner.parallel.own_model import (
    build_own_model,
    check_own_model,
    initialise_own_model,
    own_model_loss,
)
from inner.params import LocalParams
from tests.harness import run_ranks
from tests.inner.small import SIZES, batch, build_trainer, share
from tests.own.models import GatedConv

ONE = Degrees()
SEQ_LEN = 16


def own(name: str = "GatedConv", **options: int) -> OwnModel:
    return OwnModel(name=f"tests.own.models:{name}", options=options, vocab_size=SIZES.vocab_size)


def check(
    model: OwnModel,
    degrees: Degrees = ONE,
    parallel: ParallelConfig | None = None,
    *,
    masks: bool = False,
):
    check_own_model(model, degrees, parallel or ParallelConfig(), SEQ_LEN, masks_documents=masks)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("GatedConf", {}, r"the nearest name is tests\.own\.models:GatedConv"),
        (
            "GatedConv",
            {"heads": 4},
            r"is GatedConv\(vocab_size.*with vocab_size, seq_len, heads it raised TypeError",
        ),
        ("NoBlocks", {}, "has no blocks in `layers`"),
        ("AnyAxis", {}, r"axes is \('dp_shard', 'tp'\); allowed: dp_replicate and dp_shard"),
        ("HiddenOnly", {}, r"maps tokens \(2, 16\) to \(2, 16, 32\); need logits \(2, 16, 61\)"),
        ("Unused", {}, "has spare, which gets no gradient"),
        ("EmptyBuffer", {}, r"buffers and no method fill_buffers\(\)"),
        ("Fails", {}, r"failed on tokens of shape \(2, 16\): RuntimeError"),
    ],
)
def test_a_model_that_breaks_the_contract_is_refused(
    name: str, options: dict[str, int], why: str
) -> None:
    with pytest.raises(InputError, match=f"(?s)^model.name: .*{why}"):
        check(own(name, **options))


@pytest.mark.parametrize(
    "degrees", [Degrees(pp=2), Degrees(cp=2), Degrees(tp=2), Degrees(dp_shard=2)], ids=str
)
def test_a_mesh_that_it_does_not_name_is_refused(degrees: Degrees) -> None:
    with pytest.raises(
        InputError, match=rf"island.mesh: {degrees.__str__()[:-1]} 2, but .* over dp_replicate only"
    ):
        check(own("Replicated"), degrees)
    check(own("Replicated"), Degrees(dp_replicate=2))


def test_what_it_does_not_get_is_refused() -> None:
    with pytest.raises(InputError, match=r"data.document_mask: .* set document_mask to false"):
        check(own(), masks=True)
    with pytest.raises(
        InputError, match=r"island.parallel.recompute: .* set it to selective or full"
    ):
        check(own(), parallel=ParallelConfig(recompute="attention"))


def test_first_weights_are_its_own_choice_and_buffers_are_filled() -> None:
    model = build_own_model(own("Replicated"), SEQ_LEN).to_empty(device="cpu")
    initialise_own_model(LocalParams(model, [model]), model, seed=3)
    assert torch.equal(model.get_parameter("norm.weight"), torch.full((32,), 2.0))
    assert 0.09 < float(model.get_parameter("head.weight").std()) < 0.11
    assert model.get_buffer("scale") == 3.0


def test_the_loss_is_the_sum_over_valid_targets() -> None:
    model = GatedConv(SIZES.vocab_size, SEQ_LEN)
    torch.nn.init.normal_(model.positions)
    window = batch(0)[:3]
    tokens, targets = window[:, :-1], window[:, 1:]
    got = own_model_loss(model, MicroBatch(tokens, targets, None))
    logits = model(tokens.clamp(min=0))
    log_probs = (
        F.log_softmax(logits, dim=-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    )
    expected = -(log_probs * (targets >= 0)).sum()
    torch.testing.assert_close(got, expected)


def test_in_bf16_it_keeps_fp32_masters_and_learns() -> None:
    for losses in (run_ranks(train_in_bf16, num_ranks, num_ranks)[0] for num_ranks in (1, 2)):
        assert losses[-1] < losses[0] - 0.1


def train_in_bf16(_: int, num_ranks: int) -> list[float | None]:
    trainer = build_trainer(Degrees(dp_shard=num_ranks), own(), compute_dtype="bfloat16")
    assert {param.dtype for param in trainer.model_parts[0].parameters()} == {torch.float32}
    return [trainer.step(share(trainer, batch(step))).loss for step in range(12)]
