"""`diloco plan`: its output, and its answers to mistakes."""

import re
from io import StringIO
from pathlib import Path

import pytest
import tokenizers
from rich.console import Console

from diloco.config.schema import load_config
from diloco.errors import ConfigError
from diloco.planning.mesh.step_plan import build_step_plan, vocabulary
from diloco.planning.plan import PlanRequest, StepTime, parse_count, show_plan, step_time
from inner.measure.param_specs import num_elements, param_specs

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


def printed(overrides: list[str], width: int = 100, **asked: object) -> list[str]:
    """The lines that the command prints at a terminal width of `width`."""
    out = StringIO()
    question = PlanRequest(**{"step_seconds": "0.1", "codec_speed": "4G"} | asked)  # pyright: ignore
    show_plan(QUICKSTART, overrides, question, Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


METHODS = sorted((QUICKSTART.parent / "methods").glob("*.yaml"))


@pytest.mark.parametrize("bandwidth", ["10mbit", "1mbit"])
@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_every_shipped_method_can_be_planned(path: Path, bandwidth: str):
    out = StringIO()
    question = PlanRequest(step_seconds="0.1", codec_speed="4G", bandwidth=bandwidth, rtt="50ms")
    show_plan(path, [], question, Console(file=out, width=100))
    assert "bits per parameter" in out.getvalue()


def error_of(overrides: list[str] | None = None, **asked: object) -> str:
    with pytest.raises(ConfigError) as caught:
        printed(overrides or [], **asked)
    return str(caught.value)


def test_the_plan_shows_every_term_memory_time_and_advice():
    text = "\n".join(printed([], bandwidth="1mbit", rtt="50ms"))
    for word in (
        "inner steps",
        "transfer",
        "round trips",
        "codec",
        "outer step",
        "slowest island",
        "global params",
    ):
        assert word in text
    assert "tokens/s" in text and "bits per parameter" in text
    assert "set outer." in text


def test_host_memory_is_what_the_outer_loop_keeps():
    def amounts(*overrides: str) -> dict[str, str]:
        lines = printed(list(overrides))
        start = next(i for i, line in enumerate(lines) if line.startswith("What a rank holds"))
        rows = [
            re.split(r"\s{2,}", line.strip()) for line in lines[start + 2 : lines.index("", start)]
        ]
        return {name: estimate for name, *_, estimate in rows}

    plain = amounts()
    assert plain["global params"] == "2.1 MB", "1.05M parameters, 4 bytes each, on 2 ranks"
    assert "outer momentum" not in plain and "residuals of coding" not in plain
    assert amounts("outer.optimizer.momentum=0.9")["outer momentum"] == "2.1 MB"
    assert amounts("outer.coding.feedback=0.9")["residuals of coding"] == "6.3 MB", (
        "the old ones and the new ones"
    )
    assert plain["a round's snapshot"] == "2.1 MB"
    moments = amounts("outer.moments=[3,6]")
    assert moments["averaged moments"] == "4.2 MB" and moments["a round's snapshot"] == "6.3 MB"
    assert moments["global params"] == plain["global params"]
    assert amounts("outer.fragments=5")["a round's snapshot"] == "492 kB", (
        "of the largest fragment, a layer"
    )


def test_no_line_is_wider_than_the_terminal():
    for width in (80, 100):
        assert max(map(len, printed([], width, bandwidth="1mbit", rtt="50ms"))) <= width


def test_the_status_is_asked_for_with_the_utilisation():
    def status(**asked: object) -> bool:
        question = PlanRequest(step_seconds="0.1", bandwidth="1mbit", **asked)  # pyright: ignore
        return show_plan(QUICKSTART, [], question, Console(file=StringIO()))

    assert status() and status(utilisation=0.01) and not status(utilisation=0.99)


def test_with_gpus_the_plan_says_what_laws_and_our_runs_say():
    asked = {"gpus": 16, "watts": 1000.0, "flops": "400T", "tokens": "1G"}
    text = "\n".join(printed([], 160, **asked))
    for word in (
        "1.05M parameters on 1B tokens",
        "kWh",
        "Chinchilla",
        "2503.09799, extrapolated",
        "rounds; here 40",
        "with outer lr 1, momentum 0.6",
    ):
        assert word in text, text
    assert "best in 10 h" in "\n".join(printed([], 160, hours=10.0, **asked))
    assert "scaling laws" not in "\n".join(printed([]))


def test_the_time_on_gpus_is_compute_over_their_speed():
    def hours(**more: object) -> float:
        line = next(
            line
            for line in printed([], 160, flops="1G", tokens="100M", **more)
            if line.startswith("takes")
        )
        return float(line.split()[1]) * (24 if "days" in line else 1)

    assert hours(gpus=8) == pytest.approx(hours(gpus=2) / 4, rel=0.01)


def test_watts_and_hours_without_gpus_are_refused():
    assert "--gpus" in error_of(watts=700.0) and "--gpus" in error_of(hours=3.0)


def test_a_codec_slower_than_the_link_is_warned_of():
    assert any("WARNING: int8 is slower" in line for line in printed([], codec_speed="1M"))
    assert not any("WARNING" in line for line in printed([], bandwidth="1mbit"))


def test_unequal_islands_make_a_spread():
    text = "\n".join(printed(["islands=[{ranks: 1}, {ranks: 2}]"], step_seconds=None, flops="1T"))
    assert "100.0 % longer" in text


@pytest.mark.parametrize(
    ("asked", "flag", "cure"),
    [
        ({"bandwidth": "fast"}, "--bandwidth", "100mbit"),
        ({"rtt": "50"}, "--rtt", "50ms"),
        ({"tokens": "many"}, "--tokens", "10B"),
        ({"step_seconds": "0"}, "--step-seconds", "200ms"),
        ({"step_seconds": None, "flops": "-3"}, "--flops", "10B"),
        ({"codec_speed": "2GB"}, "--codec-speed", "10B"),
    ],
)
def test_a_mistyped_flag_is_answered_with_its_name_and_a_cure(asked, flag, cure):
    text = error_of(**asked)
    assert text.startswith(flag) and cure in text


def test_too_many_fragments_are_answered_with_as_many_as_there_can_be():
    with pytest.raises(ValueError, match=r"outer.fragments=5"):
        printed(["outer.fragments=9", "outer.inner_steps=30"])


def test_counts_are_read_with_their_letters():
    assert [parse_count(text) for text in ("10B", "1.5k", "2e6", "400T")] == [
        1e10,
        1500.0,
        2e6,
        4e14,
    ]


def test_gpus_of_different_kinds_make_the_slower_island_wait_as_long_as_their_peaks_differ():
    def seconds(gpu: str) -> StepTime:
        config = load_config(QUICKSTART)
        islands = [build_step_plan(config.run, config.for_island(0))]
        return step_time(config, islands, PlanRequest(gpu=gpu))

    one, two = seconds("h100"), seconds("h100, A100")
    assert one.spread == 0 and two.seconds == one.seconds
    assert two.spread == pytest.approx(989 / 312 - 1)


def test_a_wrong_gpu_is_named_with_the_known_ones():
    assert "got 'h1000', which is not a known GPU" in error_of(gpu="h1000", step_seconds=None)
    assert "mi300x" in error_of(gpu="h1000", step_seconds=None)
    assert "got 2 kinds" in error_of(["islands=[{},{},{}]"], gpu="h100,a100", step_seconds=None)
    assert "give one of them" in error_of(gpu="h100", flops="1T", step_seconds=None)


SHIPPED = sorted(
    path for path in QUICKSTART.parent.rglob("*.yaml") if "experiments" not in path.parts
)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_vocabulary_of_every_shipped_config_is_known_without_a_network(path: Path):
    assert not vocabulary(load_config(path).run)[1]


def test_the_shipped_clusters_are_planned_with_the_vocabulary_of_their_tokenizer():
    config = load_config(QUICKSTART.parent / "two-clusters.yaml")
    sizes = build_step_plan(config.run, config.for_island(0)).work.sizes
    assert (sizes.vocab_size, round(num_elements(param_specs(sizes)) / 1e6)) == (50257, 252)


def test_a_vocabulary_that_is_not_known_is_warned_of_beside_the_recommendation():
    text = " ".join(printed(["data.tokenizer=some/tokenizer"], width=200)[-4:])
    assert (
        "warning: all of this is for a vocabulary of 260, as the tokenizer 'some/tokenizer' is not "
        "on" in text
    )
    assert not any("warning" in line for line in printed(["data.tokenizer=gpt2"], width=200))


def test_a_tokenizer_in_the_cache_of_the_hub_gives_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cached = tmp_path / "models--some--tokenizer"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 776}, unk_token="a"))
    made.save(str(cached / "snapshots" / "abc" / "tokenizer.json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert vocabulary(load_config(QUICKSTART, ["data.tokenizer=some/tokenizer"]).run) == (
        777,
        False,
    )
