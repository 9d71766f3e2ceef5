"""Tables and plots of the documentation are those that the planner gives now, and the small
programs behind them are right.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from scripts import docs_attention, docs_plots, docs_roofline
from scripts.docs_attention import Traffic, attend_in_tiles, count_tiles

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", docs_plots.TABLES)
def test_a_table_on_a_page_is_what_is_computed_now(name: str) -> None:
    page = (docs_plots.DOCS / docs_plots.TABLES[name][0]).read_text()
    assert docs_plots.with_table(page, name) == page, "python -m scripts.docs_plots"


def test_the_plots_can_be_drawn_and_are_on_a_page(tmp_path: Path) -> None:
    pages = "".join(path.read_text() for path in docs_plots.DOCS.glob("*.md"))
    for picture in docs_plots.draw_all(tmp_path):
        assert picture.stat().st_size > 10_000
        assert f"](images/{picture.name})" in pages


@pytest.mark.parametrize(("length", "rows", "columns"), [(64, 16, 16), (96, 32, 16), (50, 16, 8)])
def test_attention_in_tiles_is_attention(length: int, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        4 * torch.randn(length, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    found = attend_in_tiles(q, k, v, rows, columns, Traffic())
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "rows", "columns"), [(64, 16, 16), (96, 32, 16), (128, 64, 32)])
def test_the_formula_of_what_tiles_move_is_what_is_counted(
    length: int, rows: int, columns: int
) -> None:
    counted = Traffic()
    attend_in_tiles(
        torch.randn(length, 8),
        torch.randn(length, 8),
        torch.randn(length, 8),
        rows,
        columns,
        counted,
    )
    assert count_tiles(length, 8, rows, columns) == counted


def test_what_attention_keeps_grows_with_the_length_and_its_scores_with_the_square() -> None:
    assert docs_attention.kept_bytes(8192) == 2 * docs_attention.kept_bytes(4096)
    assert docs_attention.score_bytes(8192) == 4 * docs_attention.score_bytes(4096)


def test_the_ceilings_of_the_h100_are_those_of_the_log() -> None:
    log = (ROOT / "docs" / "log.md").read_text()
    assert f"8192 cubed {docs_roofline.PRODUCT_RATE / 1e12:.0f} TFLOP/s" in log
    assert f"copy on the card {docs_roofline.COPY_RATE / 1e12:.2f} TB/s" in log


def test_no_measured_step_is_faster_than_its_bounds() -> None:
    shapes = docs_roofline.measured_shapes()
    assert [docs_roofline.short(shape.label) for shape in shapes] == [
        "150m, 4096",
        "1b, 4096",
        "8b, six layers, 4096",
        "8b, six layers, 8192",
    ]
    for shape in shapes:
        seconds = docs_roofline.seconds_of(shape)
        assert all(value > 0 for value in seconds.values())
        assert seconds["beyond the bounds"] < 0.6 * sum(seconds.values())
