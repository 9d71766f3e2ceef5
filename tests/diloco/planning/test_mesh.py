"""`diloco mesh`: the ranks of a mesh, their groups, traffic and memory, before anything runs."""

import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from rich.console import Console
from torch.testing._internal.distributed.fake_pg import FakeStore

from diloco.config.check import check_island
from diloco.config.schema import load_config
from diloco.errors import ConfigError
from diloco.planning.mesh.picture import pipeline, show_mesh
from diloco.planning.mesh.ranks import grids, groups_text, rank_groups
from diloco.planning.mesh.request import MeshRequest, parse_bytes
from diloco.planning.mesh.step_plan import build_step_plan
from diloco.planning.mesh.traffic import traffic_lines
from inner.measure.traffic.expected import expected_traffic
from inner.mesh import AXES, Degrees, IslandMesh

ROOT = Path(__file__).parents[3]
FOUR = ROOT / "configs" / "four-dimensions.yaml"
ALL_TWO = Degrees(2, 2, 2, 2, 2)
THOUSAND = [
    "model={preset: 8b, tie_embeddings: true}",
    "data={seq_len: 8192, tokenizer: some/tokenizer}",
    "optimizer.tokens_per_step=4194304",
    "islands=[]",
    "island={ranks: 1024, micro_batch: 1, mesh: {pp: 8, dp_replicate: 4, cp: 2, tp: 4}, "
    "parallel: {schedule: interleaved_1f1b}}",
]
ONE = ["islands=[]", "island={ranks: 1, micro_batch: 2}"]
BREADTH = (
    "islands=[{ranks: 16, mesh: {pp: 2, dp_shard: 2, cp: 2, tp: 2}, parallel: {schedule: "
    "breadth_first%s}}]"
)


def picture(overrides: list[str], width: int = 100, memory: str | None = None) -> list[str]:
    """The lines that the command prints at a terminal width of `width`."""
    out = StringIO()
    show_mesh(FOUR, overrides, MeshRequest(memory=memory), Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def error_of(overrides: list[str], index: int = 0, memory: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        show_mesh(
            FOUR, overrides, MeshRequest(index=index, memory=memory), Console(file=StringIO())
        )
    return str(caught.value)


def ranks_in(cell: str) -> list[int]:
    first, _, last = cell.partition("-")
    return list(range(int(first), int(last or first) + 1))


def ranks_drawn(lines: list[str]) -> list[int]:
    """The ranks in the cells of a grid, without its title, header and row labels."""
    ranks = []
    for line in lines:
        cells = re.sub(rf"\b({'|'.join(AXES)}) \d+", "", line)
        ranks += [rank for cell in cells.split() for rank in ranks_in(cell)]
    return ranks


# Ranks and groups


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1),
        (1, 1, 1, 1, 8),
        (1, 1, 8, 1, 1),
        (2, 1, 2, 2, 2),
        ALL_TWO.sizes,
        (4, 2, 2, 1, 1),
    ],
)
def test_every_rank_is_in_one_cell_of_a_small_mesh(sizes):
    degrees = Degrees(*sizes)
    _, *lines = grids(degrees, width=80)
    has_heads = any(degree > 1 for degree in sizes[:-1])
    assert ranks_drawn(lines[has_heads:]) == list(range(degrees.num_ranks))


def test_every_rank_is_in_one_block_of_a_large_mesh_and_the_first_block_is_drawn_alone():
    lines = grids(Degrees(4, 4, 4, 2, 8), width=80)
    middle = next(index for index, line in enumerate(lines) if line.startswith("The first block"))
    assert ranks_drawn(lines[2:middle]) == list(range(1024))
    assert ranks_drawn(lines[middle + 2 :]) == list(range(64))


def test_a_grid_shows_each_rank_at_its_coordinates():
    assert grids(Degrees(pp=2, dp_shard=2, cp=2, tp=2), width=80) == [
        "Ranks, tp in a cell",
        "                cp      0      1",
        "  pp 0  dp_shard 0    0 1    2 3",
        "        dp_shard 1    4 5    6 7",
        "  pp 1  dp_shard 0    8 9  10 11",
        "        dp_shard 1  12 13  14 15",
    ]


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1024, 1, 1), (64, 1, 16, 1, 1), (2, 512, 1, 1, 1), (8, 4, 4, 2, 4), (32, 2, 2, 2, 4)],
)
@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_grid_of_a_thousand_ranks_is_short_and_fits_the_width(sizes, width):
    lines = grids(Degrees(*sizes), width)
    assert len(lines) <= 12 and max(map(len, lines)) <= width
    assert any("1023" in line for line in lines)


@pytest.mark.parametrize("sizes", [ALL_TWO.sizes, (2, 1, 3, 2, 4), (1, 2, 1, 5, 1)])
def test_groups_are_the_lines_of_the_grid_of_ranks(sizes):
    degrees = Degrees(*sizes)
    grid = np.arange(degrees.num_ranks).reshape(sizes)
    for index, axis in enumerate(AXES):
        lines = np.moveaxis(grid, index, -1).reshape(-1, sizes[index])
        assert rank_groups(degrees, axis) == lines.tolist()
    planes = np.moveaxis(grid, (2, 3), (-2, -1)).reshape(-1, sizes[2] * sizes[3])
    assert rank_groups(degrees, "dp_shard", "cp") == planes.tolist()


@pytest.mark.parametrize("rank", [0, 13, 31])
def test_groups_are_those_of_the_mesh_that_trains(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=32)
    try:
        mesh = IslandMesh(ALL_TWO, "cpu")
        theirs = {
            ("pp",): mesh.pp_group,
            ("dp_replicate",): mesh.fsdp["dp_replicate"].get_group(),
            ("dp_shard", "cp"): mesh.fsdp["fsdp"].get_group(),
            ("cp",): mesh.cp_group,
            ("tp",): mesh.tp.get_group(),
        }
        for axes, group in theirs.items():
            assert dist.get_process_group_ranks(group) in rank_groups(ALL_TWO, *axes), axes
            assert rank in dist.get_process_group_ranks(group)
    finally:
        dist.destroy_process_group()


def test_groups_that_do_not_fit_are_left_out_and_said_to_be():
    assert groups_text([[0, 4], [1, 5], [2, 6]], width=15) == "0 4 | 1 5 | 2 6"
    assert groups_text([[0, 4], [1, 5], [2, 6]], width=14) == "0 4 | ..."
    assert groups_text([list(range(8)), list(range(8, 16))], width=80) == "0-7 | 8-15"
    assert groups_text([list(range(0, 64, 8))], width=80) == "0 8 .. 56"


# The whole picture


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize(
    "overrides", [[], ONE, THOUSAND, [BREADTH % ""]], ids=["16", "1", "1024", "breadth"]
)
def test_no_line_is_longer_than_the_terminal_and_no_table_is_cut(overrides, width):
    lines = picture(overrides, width, memory="100GB")
    assert max(map(len, lines)) <= width
    assert not any("\N{HORIZONTAL ELLIPSIS}" in line for line in lines)


def test_a_thousand_ranks_stay_on_a_page():
    assert len(picture(THOUSAND, width=100)) < 60


EXPERTS = [
    "model={preset: 1m-experts}",
    "islands=[]",
    "island={ranks: 8, micro_batch: 2, mesh: {pp: 2, dp_shard: 2, cp: 2}}",
]


def test_of_a_mixture_the_header_says_what_a_token_uses():
    text = " ".join(" ".join(picture(EXPERTS)).split())
    model = (
        "model 1.19M parameters, 420k active: 4 layers, dim 96, 4 heads (keys of 32, values "
        "of 24, from 32)"
    )
    assert f"{model}, vocabulary 260" in text
    assert "3 layers have 16 experts of width 64; a token uses 2 of them and 1 shared" in text


SPREAD = [
    *EXPERTS[:2],
    "island={ranks: 16, micro_batch: 2, mesh: {pp: 2, dp_shard: 4, tp: 2, ep: 4}}",
]


def test_a_mixture_on_ep_is_drawn_a_second_time() -> None:
    lines = picture(SPREAD)
    first = lines.index("The same ranks for experts, ep in a cell")
    assert [line.split() for line in lines[first + 1 : first + 4]] == [
        ["edp", "0", "1"],
        ["pp", "0", "0-3", "4-7"],
        ["pp", "1", "8-11", "12-15"],
    ]
    assert any("edp 2 x ep 4: a rank computes with 4 experts of a layer" in line for line in lines)


def test_rows_and_experts_have_lines_of_their_own_in_the_traffic() -> None:
    config = load_config(FOUR, SPREAD)
    lines = traffic_lines(build_step_plan(config.run, config.for_island(0)).work)
    groups = {line.what: (line.axis, line.groups) for line in lines if line.axis in ("ep", "edp")}
    neighbours = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    apart = [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups == {
        "rows of tokens": ("ep", neighbours),
        "weights of experts": ("edp", apart),
        "gradients of experts": ("edp", apart),
    }


def test_a_rank_that_gets_the_rows_of_all_ranks_needs_more_memory() -> None:
    config = load_config(FOUR, SPREAD)
    plan = build_step_plan(config.run, config.for_island(0))
    assert all(
        worst.peak > even.peak for worst, even in zip(plan.worst_memory, plan.memory, strict=True)
    )
    assert any(line.startswith("peak if all rows arrive") for line in picture(SPREAD))


@pytest.mark.parametrize("rank", [0, 13, 31])
def test_groups_of_experts_are_those_of_the_mesh_that_trains(rank: int) -> None:
    degrees = replace(ALL_TWO, ep=4)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=32)
    try:
        mesh = IslandMesh(degrees, "cpu")
        for axis in ("pp", "dp_replicate", "edp", "ep"):
            assert dist.get_process_group_ranks(mesh.sparse[axis].get_group()) in rank_groups(
                degrees, axis
            ), axis
    finally:
        dist.destroy_process_group()


def test_of_a_mixture_all_ranks_sum_the_loads_of_experts():
    (line,) = [line for line in picture(EXPERTS) if "loads of experts" in line]
    # Three layers of 16 experts, each with four more numbers, in fp64; a ring of eight ranks.
    assert line.split() == [
        "all",
        "ranks",
        "1",
        "x",
        "8",
        "0-7",
        "loads",
        "of",
        "experts",
        "1",
        "840",
        "B",
    ]


def test_the_header_says_what_is_trained_and_on_what():
    assert picture([])[:4] == [
        "four-dimensions, island-0",
        "model  181k parameters: 4 layers, dim 64, 4 heads (2 kv), vocabulary 260",
        "ranks  16 = pp 2 x dp_replicate 1 x dp_shard 2 x cp 2 x tp 2",
        "step   2,048 tokens = data ranks 2 x micro-batches 4 x sequences 2 x length 128",
    ]


def test_a_vocabulary_that_is_not_known_is_said_to_be_assumed():
    assert any("vocabulary assumed, 'some/tokenizer'" in line for line in picture(THOUSAND))
    known = picture(["data.tokenizer=some/tokenizer", "model.vocab_size=500"])
    assert known[1].endswith("vocabulary 500") and not any("assumed" in line for line in known)


def test_the_schedule_is_drawn_with_its_bubble():
    config = load_config(FOUR)
    name, drawn = pipeline(build_step_plan(config.run, config.for_island(0)), width=80)
    assert name == "Pipeline: 1f1b, 2 stages on 2 ranks; bubble 25 %, if backward = 2 x forward"
    assert drawn.splitlines()[:2] == [
        "rank 0 |0>1>....0<<<2>1<<<3>2<<<..3<<<|",
        "rank 1 |..0>0<<<1>1<<<2>2<<<3>3<<<....|",
    ]


def test_what_stays_gathered_under_breadth_first_is_said():
    two = "\n".join(picture(["model.num_layers=8", BREADTH % ""]))
    four = "\n".join(picture(["model.num_layers=8", BREADTH % ", stages_per_rank: 4"]))
    freed = "\n".join(picture(["model.num_layers=8", BREADTH % ", zero: 3"]))
    assert "a rank's 2 stages stay gathered from first to last use" in two
    assert "Of a rank's 4 stages torch keeps the weights of the next 3 gathered" in four
    assert "gathered from" not in freed and "next 3" not in freed
    assert "next 3" not in "\n".join(picture([]))


def test_layers_and_live_micro_batches_are_those_of_each_pipeline_rank():
    lines = picture([])
    assert re.search(r"^ +pp 0 +pp 1$", "\n".join(lines), re.MULTILINE)
    assert any(re.fullmatch(r"layers +embed 0-1 +2-3 head", line) for line in lines)
    assert any(re.fullmatch(r"live micro-batches +2 +1", line) for line in lines)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        THOUSAND,
        ["model.tie_embeddings=true"],
        ["islands=[{ranks: 8, micro_batch: 2, mesh: {cp: 2, dp_shard: 1, dp_replicate: 4}}]"],
        ["islands=[{ranks: 2, micro_batch: 2, mesh: {cp: 2}, parallel: {context: ulysses}}]"],
        ["islands=[{ranks: 4, mesh: {tp: 2}, parallel: {sequence_parallel: false}}]"],
    ],
    ids=["four dimensions", "1024", "tied", "replicas", "ulysses", "no sequence parallel"],
)
def test_all_that_ranks_send_is_in_the_table(overrides):
    config = load_config(FOUR, overrides)
    work = build_step_plan(config.run, config.for_island(0)).work
    lines = traffic_lines(work)
    expected = [
        row for pp_rank in range(work.degrees.pp) for row in expected_traffic(work, pp_rank)
    ]
    most = max(
        sum(row.sent_bytes for row in expected_traffic(work, pp_rank))
        for pp_rank in range(work.degrees.pp)
    )
    assert most <= sum(line.sent_bytes for line in lines) <= sum(row.sent_bytes for row in expected)
    assert {line.axis for line in lines} >= {
        axis for axis in AXES if getattr(work.degrees, axis) > 1
    }
    assert all(
        len(line.groups) * len(line.groups[0]) == work.degrees.num_ranks for line in lines[:-1]
    )


# Memory


def test_a_limit_is_compared_with_the_rank_that_needs_most():
    config = load_config(FOUR)
    peak = max(each.peak for each in build_step_plan(config.run, config.for_island(0)).memory)
    console = Console(file=StringIO(), width=100)
    assert show_mesh(FOUR, [], MeshRequest(memory=f"{peak}B"), console)
    assert not show_mesh(FOUR, [], MeshRequest(memory=f"{peak - 1}B"), console)


def test_what_does_not_fit_names_a_value_to_set():
    text = " ".join(picture(["islands=[{ranks: 1, micro_batch: 8}]"], memory="4MB"))
    assert "island.parallel.recompute=" in text or "island.micro_batch=" in text


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("1.5 GiB", 3 * 2**29), ("7kB", 7000), ("2 tb", 2 * 10**12), ("9B", 9)],
)
def test_sizes_are_read_as_they_are_written(text, size):
    assert parse_bytes("--memory", text) == size


# Mistakes, and what it costs


def test_a_wrong_mesh_is_the_error_of_every_other_command():
    overrides = ["islands=[{ranks: 16, mesh: {tp: 3}}]"]
    config = load_config(FOUR, overrides)
    with pytest.raises(ConfigError) as caught:
        check_island(config.run, config.for_island(0), "island 0")
    assert error_of(overrides) == str(caught.value)


def test_an_island_that_is_not_listed_is_refused():
    assert "--island: got 3; allowed: 0, 1" in error_of(
        ["islands=[{ranks: 1}, {ranks: 1}]"], index=3
    )


@pytest.mark.parametrize("text", ["80", "GB", "much", "-3GB", "80 gigs"])
def test_a_size_that_is_none_is_refused_with_an_example(text):
    message = error_of([], memory=text)
    assert repr(text) in message and "for example 80GB" in message


def test_a_missing_tokenizer_file_is_named():
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        picture(["data.tokenizer=nowhere.json"])


def test_no_process_group_starts():
    picture(THOUSAND)
    assert not dist.is_initialized()


def test_without_a_pipeline_the_command_answers_before_it_loads_torch_and_fails_in_one_line():
    # The outer loop's memory needs torch and comes last.
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom diloco.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)"
    )
    overrides = ["islands=[{ranks: 8, micro_batch: 2, mesh: {tp: 2}}]"]
    command = [sys.executable, "-c", code, "mesh", str(FOUR), *overrides]
    done = subprocess.run(command, cwd=ROOT, timeout=180, capture_output=True, text=True)
    assert (
        "peak" in done.stdout.rstrip().splitlines()[-1] and "import of torch halted" in done.stderr
    )
    wrong = [
        sys.executable,
        "-m",
        "diloco",
        "mesh",
        str(FOUR),
        "islands=[{ranks: 3, mesh: {tp: 2}}]",
    ]
    failed = subprocess.run(wrong, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stdout == ""
    assert (
        failed.stderr.startswith("error: island 0: island.mesh: tp 2")
        and failed.stderr.count("\n") == 1
    )


def test_the_status_says_that_a_step_does_not_fit():
    command = [
        sys.executable,
        "-m",
        "diloco",
        "mesh",
        str(FOUR),
        "islands=[{ranks: 1}]",
        "--memory",
        "1kB",
    ]
    done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "") and "an inner step needs" in done.stdout


def seconds_of(overrides: list[str], **flags: str) -> dict[str, tuple[str, float]]:
    """The section of seconds: by what, the link or rate and the seconds."""
    out = StringIO()
    show_mesh(FOUR, overrides, MeshRequest(**flags), Console(file=out, width=160))  # pyright: ignore[reportArgumentType]
    section = out.getvalue().split("Seconds of a step")[1].split("\n\n")[0]
    rows = [re.split(r"\s{2,}", line.strip()) for line in section.splitlines()[2:]]
    return {what: (by, float(seconds)) for what, by, seconds in rows}


def test_traffic_takes_the_link_of_its_node_or_the_one_between_nodes():
    rows = seconds_of([], gpu="h100", fabric="ethernet-100")
    assert rows["tp: activations"][0] == "h100's own link, 450 GB/s"
    assert rows["pp: activations"][0] == "ethernet-100, 12.5 GB/s", (
        "16 ranks, pp 2: ranks 0 and 8 are on two nodes"
    )
    config = load_config(FOUR)
    lines = traffic_lines(build_step_plan(config.run, config.for_island(0)).work)
    sent = {(line.axis, line.what): line.sent_bytes for line in lines}
    assert rows["pp: activations"][1] == pytest.approx(sent["pp", "activations"] / 12.5e9, rel=0.01)


def test_a_step_must_fit_into_the_gpu_that_is_named():
    console = Console(file=StringIO())
    assert show_mesh(FOUR, [], MeshRequest(gpu="h100"), console)
    large = [*THOUSAND, "island={ranks: 256, micro_batch: 4, mesh: {tp: 4}}"]
    assert not show_mesh(FOUR, large, MeshRequest(gpu="rtx4090"), console)
    with pytest.raises(ConfigError, match="--gpu, too"):
        show_mesh(FOUR, [], MeshRequest(fabric="ethernet-10"), console)


def test_a_run_with_stages_has_a_line_for_each_and_the_picture_is_of_the_one_that_needs_most():
    stages = "[{tokens: 65536, seq_len: 64, tokens_per_step: 2048}, {tokens_per_step: 8192}]"
    lines = picture(
        ["outer.rounds=40", f"stages={stages}", "data.seq_len=128", "island.micro_batch=4"]
    )
    begin = next(
        number for number, line in enumerate(lines) if line.startswith("Stages of the run")
    )
    assert "of stage 2, which needs most memory" in lines[begin]
    rows = [line.split() for line in lines[begin + 2 : begin + 4]]
    assert [row[2:5] for row in rows] == [["2,048", "64", "4"], ["8,192", "128", "8"]]
    assert any(line.startswith("step   8,192 tokens") for line in lines)


def test_a_stage_that_does_not_fit_the_mesh_is_named():
    stages = "[{tokens: 65536, seq_len: 64, tokens_per_step: 1000}, {}]"
    assert "stages[0]" in error_of([f"stages={stages}", "data.seq_len=128", "island.micro_batch=4"])
