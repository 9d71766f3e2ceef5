"""Draws the plots of docs/ that follow from the planner or from kept runs, and puts its tables into
the pages.

python -m scripts.docs_plots
"""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from diloco.report.style import plot_style, save
from scripts import (
    docs_attention,
    docs_experts,
    docs_home,
    docs_long_context,
    docs_long_run,
    docs_roofline,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLOTS: dict[str, Callable[[], Figure]] = {
    "home.png": docs_home.draw_bytes,
    "tiles.png": docs_attention.draw_tiles,
    "attention-bytes.png": docs_attention.draw_traffic,
    "roof.png": docs_roofline.draw_roof,
    "gpu-time.png": docs_roofline.draw_time,
    "long-memory.png": docs_long_context.draw_memory,
    "long-flops.png": docs_long_context.draw_flops,
}
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "attention": ("attention.md", docs_attention.table),
    "roofline": ("roofline.md", docs_roofline.command_output),
    "gpu time": ("roofline.md", docs_roofline.table),
    "memory by length": ("long-context.md", docs_long_context.memory_table),
    "experts between islands": ("experts.md", docs_experts.sharing_table),
    "weights": ("long-run.md", docs_long_run.weight_table),
    "traffic by cp": ("long-context.md", docs_long_context.traffic_table),
}
"""Tables by name: their page, and what makes them."""
BEGIN = "<!-- table: {}, made by scripts/docs_plots.py -->\n"
END = "\n<!-- end of the table -->"


def draw_all(folder: Path) -> list[Path]:
    """Draw the plots into the folder. Returns their paths."""
    paths = []
    with plot_style():
        for name, draw in PLOTS.items():
            save(draw(), folder / name)
            paths.append(folder / name)
    return paths


def with_table(page: str, name: str) -> str:
    """A page with the table of this name as it is now."""
    before, found, rest = page.partition(BEGIN.format(name))
    assert found, f"the page has no place for the table {name!r}"
    after = rest[rest.index(END) :]
    return f"{before}{found}\n{TABLES[name][1]()}\n{after}"


if __name__ == "__main__":
    for path in draw_all(DOCS / "images"):
        print(path)
    for name, (page_name, _) in TABLES.items():
        path = DOCS / page_name
        path.write_text(with_table(path.read_text(), name))
        print(path)
