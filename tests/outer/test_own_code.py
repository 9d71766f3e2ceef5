"""Codecs, merge rules and outer optimizers of the user's own: what is tried, and rounds that are
made with them.
"""

import hashlib
import sys
from pathlib import Path

import pytest
import torch

import inner.import_path
import outer.config.own_code
from diloco.config.own_code import provide_own_code
from diloco.config.schema import parse_config
from diloco.errors import ConfigError
from diloco.testing import check_codec, check_merge, check_outer_rule
from inner.import_path import load
from outer.codecs import build_codec
from outer.codecs.choice import build_codec_choice
from outer.config import CODECS, MERGE_RULES, MergeConfig, OuterConfig
from outer.config.outer import GATHERED
from outer.errors import InputError, MessageError, NonFiniteError
from outer.merges import build_merge
from outer.own_code import provide
from outer.state.own_rule import build_own_rule
from tests.outer.islands import GUARD_SECONDS, Island, run_islands

torch.set_num_threads(1)
IDEAS = Path(__file__).parents[2] / "examples" / "ideas"
CODEC, RULE, MERGE = "sign_codec:Sign", "sign_momentum:SignMomentum", "soft_mean:soft_mean"


@pytest.fixture(autouse=True)
def ideas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of own code, as if the operator's config named them."""
    monkeypatch.setattr(sys, "path", [str(IDEAS), *sys.path])
    for path in (CODEC, RULE, MERGE):
        provide(path, load(path, "outer"))


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_of_ours_passes_the_checks(name: str) -> None:
    check_codec(build_codec(name))


@pytest.mark.parametrize("name", MERGE_RULES)
def test_every_merge_rule_of_ours_passes_the_checks(name: str) -> None:
    check_merge(build_merge(MergeConfig(rule=name)), name)


def test_the_examples_are_files_of_fifty_lines() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in IDEAS.glob("*.py")}
    assert len(lines) == 3 and max(lines.values()) <= 50


class Doubles:
    """fp32 as it is: a codec that holds every claim, to be broken below."""

    def num_bytes(self, num_elements: int) -> int:
        return 4 * num_elements

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone().view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        return payload.view(torch.float32)


class Short(Doubles):
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone().view(torch.uint8)[:-1]


class Overflows(Doubles):
    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        return payload.view(torch.float32) * 2


class MovesZeros(Doubles):
    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        return payload.view(torch.float32).clamp(-1e38, 1e38) + 1


class Draws(Doubles):
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return (values * torch.rand(())).view(torch.uint8)


class WritesToThePayload(Doubles):
    def decode(self, payload: torch.Tensor, num_elements: int) -> torch.Tensor:
        return payload.view(torch.float32).mul_(0.5)


@pytest.mark.parametrize(
    "broken, claim",
    [
        (Short, "exactly num_bytes"),
        (Overflows, "Finite values decode"),
        (MovesZeros, "A part of zeros"),
        (Draws, "Equal values give equal bytes"),
        (WritesToThePayload, "leaves the payload alone"),
    ],
)
def test_a_codec_that_breaks_a_claim_is_refused_with_the_claim(
    broken: type[Doubles], claim: str
) -> None:
    check_codec(Doubles())
    with pytest.raises(
        InputError, match=f"outer.codec: the codec {broken.__name__} must do this: .*{claim}"
    ):
        check_codec(broken())


def test_own_decoders_raise_a_message_error_for_whatever_a_peer_sends() -> None:
    codec = build_codec(CODEC)
    payload = codec.encode(torch.ones(300))
    with pytest.raises(
        MessageError, match=f"Sign payload of {len(payload) - 1} bytes, {len(payload)} expected"
    ):
        codec.decode(payload[:-1], 300)
    with pytest.raises(MessageError, match="Sign payload decodes to nan"):
        codec.decode(torch.full_like(payload, 255), 300)
    with pytest.raises(NonFiniteError):
        codec.encode(torch.tensor([float("inf")]))


def test_a_codec_below_eight_bits_leaves_norms_and_biases_to_int8() -> None:
    assert build_codec(CODEC).is_coarse
    assert [name for name in CODECS if build_codec(name).is_coarse] == [
        "int4",
        "e3m0",
        "stat2",
        "topk",
        "lowrank",
    ]
    assert [name for name in CODECS if build_codec(name).gathers] == list(GATHERED)


def test_a_merge_rule_that_ignores_weights_of_zero_not_at_all_is_still_given_none_of_them() -> None:
    merge = check_merge(lambda parts, weights, last: torch.stack(parts).mean(0))
    merged = merge([torch.ones(2), torch.full((2,), 9.0)], [1.0, 0.0], None)
    assert merged.tolist() == [1.0, 1.0]


def test_a_merge_rule_that_gives_another_shape_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"outer.merge.rule: mine gave torch.float32 of shape \(1,\)"
    ):
        check_merge(lambda parts, weights, last: parts[0][:1], "mine")


class SharesANorm:
    def step(
        self, params: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor, lr: float
    ) -> None:
        params.sub_(mean / mean.norm() * lr)


class Counts:
    calls = 0

    def step(
        self, params: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor, lr: float
    ) -> None:
        self.calls += 1
        params.sub_(mean * lr / self.calls)


@pytest.mark.parametrize(
    "rule, claim", [(SharesANorm, "each element is stepped by itself"), (Counts, "equal bits")]
)
def test_an_outer_optimizer_that_breaks_a_claim_is_refused(rule: type, claim: str) -> None:
    with pytest.raises(InputError, match=f"outer.optimizer.rule: the rule must do this: .*{claim}"):
        check_outer_rule(rule())


def test_code_that_no_config_of_the_operator_names_is_not_imported(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "theirs.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(
        InputError, match="'theirs:Codec', which a run of others names; it is imported only if"
    ):
        build_codec("theirs:Codec")


@pytest.mark.parametrize(
    "path, text",
    [
        ("no_such_module:Sign", "there is no module 'no_such_module' here; install its package"),
        (
            "sign_codec:Sing",
            "allowed: a class or function that sign_codec defines in sign_codec; the nearest name "
            "is sign",
        ),
    ],
)
def test_code_that_is_not_there_is_named(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"outer.codec: got '{path}'.*{text}"):
        provide_own_code(parse_config(f"outer: {{codec: '{path}'}}").run)


@pytest.mark.parametrize(
    "name",
    ["a:b", "a.b:c", "a..b:c", ".a:b", "a.1:b", "a:", ":b", "a:b:c", "a b:c", "1a:b", "int8"],
)
def test_both_sides_of_the_seam_take_the_same_names_for_import_paths(name: str) -> None:
    assert inner.import_path.is_import_path(name) == outer.config.own_code.is_import_path(name)


def test_options_that_own_code_does_not_take_are_named() -> None:
    with pytest.raises(InputError, match=r"SignMomentum\(gamma=2\) failed: TypeError"):
        build_own_rule(RULE, {"gamma": 2})


def test_sign_momentum_moves_each_parameter_by_the_learning_rate() -> None:
    params, momentum = torch.tensor([1.0, 1.0, 1.0]), torch.zeros(3)
    build_own_rule(RULE, {"beta": 0.5}).step(params, momentum, torch.tensor([4.0, -0.5, 0.0]), 0.25)
    assert params.tolist() == [0.75, 1.25, 1.0] and momentum.tolist() == [2.0, -0.25, 0.0]


def trained(island: Island) -> list[str]:
    island.outer.begin()
    digests = []
    for number in range(3):
        for index, values in enumerate(island.params.values):
            values.add_(torch.sin(values * (ord(island.name) + number + index)) * 0.1)
        digests.append(island.commit(1).digest)
    bits = b"".join(values.numpy().tobytes() for values in island.params.values)
    return [*digests, hashlib.sha256(bits).hexdigest()]


def test_rounds_with_a_codec_a_rule_and_an_optimizer_of_ones_own_end_in_equal_bits() -> None:
    values = {
        "transport": "loopback",
        "start_islands": 3,
        "wait_seconds": GUARD_SECONDS,
        "codec": CODEC,
        "coding": {"feedback": 0.9},
        "merge": {"rule": MERGE, "options": {"bound": 2.0}},
        "optimizer": {"rule": RULE, "lr": 0.01},
    }
    found = run_islands(dict.fromkeys("abc", trained), OuterConfig.model_validate(values))
    assert found["a"] == found["b"] == found["c"]
    plain = run_islands(
        dict.fromkeys("abc", trained), OuterConfig.model_validate(values | {"codec": "fp32"})
    )
    assert plain["a"] != found["a"]


@pytest.mark.parametrize(
    "section, text",
    [
        ({"coding": {"options": {"a": 1}}}, "codec of your own"),
        ({"merge": {"options": {"a": 1}}}, "a rule of your own"),
        ({"optimizer": {"options": {"a": 1}}}, "rule is null"),
        ({"optimizer": {"rule": RULE, "delayed": True}}, "delayed and align belong to SGD"),
    ],
)
def test_options_without_own_code_are_refused(section: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OuterConfig.model_validate(section)


class Gathers(Doubles):
    gathers = True


def test_an_own_codec_that_gathers_beside_a_rule_that_remembers_is_refused() -> None:
    path = f"{__name__}:Gathers"
    provide(path, Gathers)
    config = OuterConfig(codec=path, merge=MergeConfig(rule="centered_clip"))
    with pytest.raises(InputError, match="every island computes the means itself"):
        build_codec_choice(config)
