"""Draws the diagrams of docs/ as SVG, narrow enough for a phone.

python -m scripts.docs_diagrams [--into FOLDER]
"""

import argparse
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH = 360
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c2733 }
.title { font-weight: 600 }
.note { font-size: 11.5px; fill: #44566a }
.box { fill: #eef4fb; stroke: #3b6ea5; stroke-width: 1.2 }
.group { fill: none; stroke: #8aa0b6; stroke-dasharray: 4 3 }
.commit { fill: #e7f5ec; stroke: #2f855a; stroke-width: 1.2 }
.arrow { fill: none; stroke: #44566a; stroke-width: 1.4; marker-end: url(#head) }
"""
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0 8 4 0 8z" fill="#44566a"/></marker>'
)


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of text below it; lengths are pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    kind: str = "box"


def draw_box(box: Box) -> str:
    """The rectangle and its text."""
    shape = f'<rect class="{box.kind}" x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6"/>'
    title = draw_text(box.x + 10, box.y + 20, box.title, "title")
    lines = [draw_text(box.x + 10, box.y + 38 + 16 * row, line, "note") for row, line in enumerate(box.lines)]
    return "".join([shape, title, *lines])


def draw_text(x: int, y: int, text: str, kind: str = "note") -> str:
    """One line of text that begins at x."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def draw_arrow(*points: tuple[int, int]) -> str:
    """A line through the points, with a head at the last."""
    path = " ".join(f"{x} {y}" for x, y in points)
    return f'<path class="arrow" d="M{path}"/>'


def page(height: int, label: str, parts: list[str]) -> str:
    """The SVG of all parts; `label` is what a screen reader says."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
    label = f'aria-label="{escape(label)}">'
    ground = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>'
    return f"{head}{label}<style>{STYLE}</style><defs>{HEAD}</defs>{ground}{''.join(parts)}</svg>\n"


def draw_round() -> str:
    """The states of an island in a round, and what leads from one to the next."""
    left, width = 66, 196
    states = [
        Box(left, 12, width, 52, "Training", ("inner steps",)),
        Box(left, 112, width, 52, "Gathering", ("all wait until a plan is made",)),
        Box(left, 212, width, 52, "Reducing", ("the mean, part by part",)),
        Box(left, 312, width, 52, "Voting", ("the digest of the next state",)),
        Box(left, 412, width, 52, "Commit", ("outer step, new local params",), "commit"),
    ]
    middle = left + width // 2
    labels = ["its steps are done: “ready”", "the plan: who takes part", "the reduce ended", "all yes, one digest"]
    parts = [draw_box(state) for state in states]
    for row, label in enumerate(labels):
        top = 64 + 100 * row
        parts += [draw_arrow((middle, top), (middle, top + 46)), draw_text(middle + 8, top + 28, label)]
    right = left + width
    abort = draw_arrow((right, 338), (right + 24, 338), (right + 24, 138), (right + 4, 138))
    back = draw_arrow((left, 438), (left - 20, 438), (left - 20, 38), (left - 4, 38))
    words = [
        draw_text(right + 30, 218, "abort:"),
        draw_text(right + 30, 234, "nothing"),
        draw_text(right + 30, 250, "has"),
        draw_text(right + 30, 266, "changed"),
        draw_text(4, 228, "next"),
        draw_text(4, 244, "steps"),
    ]
    return page(476, "States of an island in a round", [*parts, abort, back, *words])


def draw_islands() -> str:
    """Two islands of unequal meshes, their carriers, and the link between them."""
    first = [
        Box(8, 8, 344, 150, "Island 0: FSDP over 4 ranks", kind="group"),
        *(Box(20 + 82 * rank, 40, 74, 52, f"rank {rank}", ("a quarter",)) for rank in range(4)),
        Box(20, 104, 320, 42, "one flat fp32 vector, in parts"),
    ]
    second = [
        Box(8, 238, 344, 150, "Island 1: 2 pipeline stages", kind="group"),
        Box(20, 270, 320, 42, "the same vector, the same parts"),
        *(Box(20 + 164 * stage, 324, 156, 52, f"stage {stage}", ("half of the layers",)) for stage in range(2)),
    ]
    parts = [draw_box(box) for box in [*first, *second]]
    parts += [draw_arrow((296, 146), (296, 266)), draw_arrow((324, 270), (324, 150))]
    parts += [
        draw_text(20, 182, "pseudo-gradients, encoded, part by part;"),
        draw_text(20, 200, "plan and votes between the leaders;"),
        draw_text(20, 218, "over TLS, hivemind or gloo"),
    ]
    return page(396, "Two islands with unequal meshes share one canonical space", parts)


DIAGRAMS = {"round.svg": draw_round, "islands.svg": draw_islands}


def draw_all(folder: Path) -> list[Path]:
    """Write all diagrams into the folder and return their paths."""
    paths = []
    for name, draw in DIAGRAMS.items():
        path = folder / name
        path.write_text(draw())
        paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=IMAGES)
    print(*draw_all(parser.parse_args().into), sep="\n")
