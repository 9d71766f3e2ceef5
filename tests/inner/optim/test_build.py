"""Learning rates equal their closed forms, and each parameter is stepped as configured."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from inner.config import OptimizerConfig, ParamGroup
from inner.errors import InputError
from inner.model.stage import Stage
from inner.model.transformer import Transformer
from inner.optim.build import build_optimizers
from inner.optim.learning_rate import lr_at, set_lr
from tests.inner.small import SIZES, build_model


def lrs(total_steps: int, **config: object) -> list[float]:
    settings = OptimizerConfig.model_validate(
        {"lr": 1.0, "warmup_steps": 2, "min_lr_ratio": 0.0} | config
    )
    return [lr_at(step, total_steps, settings) for step in range(total_steps + 2)]


def test_constant_warms_up_and_stays() -> None:
    assert lrs(4, schedule="constant") == [0.5, 1, 1, 1, 1, 1]


def test_cosine_ends_at_the_least_on_the_last_step() -> None:
    expected = [0.5, 1] + [
        (1 + math.cos(math.pi * part)) / 2 for part in (0.25, 0.5, 0.75, 1, 1, 1)
    ]
    assert lrs(6, schedule="cosine") == pytest.approx(expected, abs=1e-15)


def test_cosine_keeps_its_floor() -> None:
    assert lrs(6, schedule="cosine", min_lr_ratio=0.1)[5:] == pytest.approx([0.1, 0.1, 0.1])


def test_wsd_decays_linearly_over_its_last_steps() -> None:
    expected = [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    assert lrs(8, schedule="wsd", decay_steps=4) == pytest.approx(expected)


def test_wsd_without_decay_steps_stays() -> None:
    assert lrs(4, schedule="wsd") == [0.5, 1, 1, 1, 1, 1]


def test_warm_up_longer_than_the_run_never_peaks() -> None:
    assert lrs(3, schedule="cosine", warmup_steps=10)[:3] == pytest.approx([0.1, 0.2, 0.3])


MODEL = build_model()
NAMES = [name for name, _ in MODEL.named_parameters()]


def treatments(**config: Any) -> dict[str, tuple[str, float, float]]:
    """(optimizer, weight decay, lr scale) of each parameter; every one is in exactly one group."""
    optimizers = build_optimizers(
        [MODEL], NAMES, OptimizerConfig.model_validate({"weight_decay": 0.3} | config)
    )
    name_of = {id(param): name for name, param in MODEL.named_parameters()}
    found = [
        (name_of[id(param)], (type(optimizer).__name__, group["weight_decay"], group["lr_scale"]))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    assert sorted(name for name, _ in found) == sorted(NAMES)
    return dict(found)


def decays(name: str) -> bool:
    return not name.endswith("norm.weight") and name != "embed.weight"


@pytest.mark.parametrize(("name", "kind"), [("adamw", "AdamW"), ("sgd", "SGD")])
def test_only_matrices_but_the_embedding_decay(name: str, kind: str) -> None:
    assert treatments(name=name) == {
        param: (kind, 0.3 if decays(param) else 0.0, 1.0) for param in NAMES
    }


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    def kind(name: str) -> str:
        return "Muon" if name.startswith("layers.") and decays(name) else "AdamW"

    assert treatments(name="muon") == {
        name: (kind(name), 0.3 if decays(name) else 0.0, 1.0) for name in NAMES
    }


def test_the_first_matching_group_counts_and_others_stay_as_they_are() -> None:
    groups = [{"pattern": r"0\.ffn", "lr_scale": 0.5}, {"pattern": "ffn", "weight_decay": 0.7}]
    got, plain = treatments(groups=groups), treatments()
    assert got["layers.0.ffn.up_proj.weight"] == ("AdamW", 0.3, 0.5)
    assert got["layers.0.ffn_norm.weight"] == ("AdamW", 0.0, 0.5)
    assert got["layers.1.ffn.up_proj.weight"] == ("AdamW", 0.7, 1.0)
    assert got["layers.1.ffn_norm.weight"] == ("AdamW", 0.7, 1.0)
    others = [name for name in NAMES if "ffn" not in name]
    assert others and all(got[name] == plain[name] for name in others)


def test_a_group_keeps_matrices_from_muon() -> None:
    got = treatments(name="muon", groups=[{"pattern": "q_proj", "optimizer": "adamw"}])
    assert got["layers.0.attention.q_proj.weight"] == ("AdamW", 0.3, 1.0)
    assert got["layers.0.attention.k_proj.weight"] == ("Muon", 0.3, 1.0)


def test_a_stage_may_hold_nothing_that_a_pattern_takes() -> None:
    config = OptimizerConfig(groups=(ParamGroup(pattern="^head", lr_scale=0.1),))
    first, last = (
        Transformer(
            SIZES,
            torch.arange(32),
            Stage(index, range(index, index + 1), is_first=index == 0, is_last=index == 1),
        )
        for index in range(2)
    )
    (of_first,), (of_last,) = (build_optimizers([stage], NAMES, config) for stage in (first, last))
    assert {group["lr_scale"] for group in of_first.param_groups} == {1.0}
    assert {group["lr_scale"] for group in of_last.param_groups} == {1.0, 0.1}
    (of_both,) = build_optimizers([first, last], NAMES, config)
    assert sum(len(group["params"]) for group in of_both.param_groups) == len(NAMES)


def test_both_copies_of_a_tied_table_are_stepped() -> None:
    sizes = replace(SIZES, tie_embeddings=True)
    names = [name for name, _ in build_model(sizes).named_parameters()]
    stages = [
        Transformer(sizes, torch.arange(32), Stage(0, range(1), True, False)),
        Transformer(sizes, torch.arange(32), Stage(1, range(1, 2), False, True)),
    ]
    (optimizer,) = build_optimizers(stages, names, OptimizerConfig())
    stepped = [param for group in optimizer.param_groups for param in group["params"]]
    assert [
        sum(param is stage.get_parameter("embed.weight") for param in stepped) for stage in stages
    ] == [1, 1]


def test_the_learning_rate_is_scaled_by_group() -> None:
    config = OptimizerConfig(
        name="muon", groups=(ParamGroup(pattern="^(head|layers)", lr_scale=0.25),)
    )
    optimizers = build_optimizers([MODEL], NAMES, config)
    set_lr(optimizers, 0.4)
    name_of = {id(param): name for name, param in MODEL.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                is_scaled = name_of[id(param)].startswith(("head", "layers"))
                assert group["lr"] == pytest.approx(0.1 if is_scaled else 0.4)


def test_a_scale_of_0_freezes() -> None:
    model = build_model()
    (optimizer,) = build_optimizers(
        [model], NAMES, OptimizerConfig(groups=(ParamGroup(pattern="norm", lr_scale=0),))
    )
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    set_lr([optimizer], 0.1)
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == ("norm" in name), name


def input_error(*patterns: str) -> str:
    config = OptimizerConfig(groups=tuple(ParamGroup(pattern=pattern) for pattern in patterns))
    with pytest.raises(InputError) as caught:
        build_optimizers([MODEL], NAMES, config)
    return str(caught.value)


def test_a_pattern_that_matches_nothing_is_an_error_that_names_the_nearest() -> None:
    message = input_error("norm", r"layers\.0\.atention\.q_proj")
    assert "optimizer.groups[1]" in message and "'layers\\\\.0\\\\.atention\\\\.q_proj'" in message
    assert "'embed.weight'" in message
    assert "nearest name is 'layers.0.attention.q_proj.weight'" in message


def test_a_pattern_that_never_comes_first_is_an_error() -> None:
    message = input_error("norm", "q_norm")
    assert "optimizer.groups[1]: pattern 'q_norm'" in message and "by 'norm'" in message


def test_an_invalid_pattern_is_refused_with_the_config() -> None:
    with pytest.raises(ValidationError, match=r"(?s)pattern.*regular expression \(unterminated"):
        OptimizerConfig.model_validate({"groups": [{"pattern": "layers.[0"}]})


def test_only_muon_lets_a_group_choose_its_optimizer() -> None:
    with pytest.raises(ValidationError, match="'q_proj' chooses an optimizer, but name is adamw"):
        OptimizerConfig.model_validate({"groups": [{"pattern": "q_proj", "optimizer": "adamw"}]})


def test_only_muon_has_a_beta_of_rows() -> None:
    with pytest.raises(ValidationError, match="muon_row_beta is for muon, and name is adamw"):
        OptimizerConfig.model_validate({"muon_row_beta": 0.95})
