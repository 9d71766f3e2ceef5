"""Boxes, arrows and words as SVG, narrow enough for a phone and legible on a light and on a dark
page.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH = 360
LIGHT = {
    "ground": "#ffffff",
    "text": "#1c2733",
    "note": "#44566a",
    "box": "#eef4fb",
    "box-line": "#3b6ea5",
    "commit": "#e7f5ec",
    "commit-line": "#2f855a",
    "other": "#fdf1e3",
    "other-line": "#b7791f",
    "group": "#8aa0b6",
}
DARK = {
    "ground": "#1e2129",
    "text": "#e6e9ef",
    "note": "#b3bdcb",
    "box": "#243246",
    "box-line": "#7aa7d9",
    "commit": "#1f3a2c",
    "commit-line": "#68c08e",
    "other": "#45361f",
    "other-line": "#e0ab5e",
    "group": "#7c8ea3",
}
RULES = """
text {{ font: 13px system-ui, sans-serif; fill: {text} }}
.title {{ font-weight: 600 }}
.note {{ font-size: 11.5px; fill: {note} }}
.label {{ font-size: 11.5px; fill: {note}; stroke: {ground}; stroke-width: 4; paint-order: stroke }}
.ground {{ fill: {ground} }}
.box {{ fill: {box}; stroke: {box-line}; stroke-width: 1.2 }}
.commit {{ fill: {commit}; stroke: {commit-line}; stroke-width: 1.2 }}
.other {{ fill: {other}; stroke: {other-line}; stroke-width: 1.2 }}
.group {{ fill: none; stroke: {group}; stroke-dasharray: 4 3 }}
.arrow {{ fill: none; stroke: {note}; stroke-width: 1.4; marker-end: url(#head) }}
.line {{ fill: none; stroke: {group}; stroke-width: 1.2 }}
.head {{ fill: {note} }}
"""
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path class="head" d="M0 0 8 4 0 8z"/></marker>'
)


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of text below it; lengths are pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str = ""
    lines: tuple[str, ...] = ()
    kind: str = "box"


def draw_box(box: Box) -> str:
    """The rectangle and its text."""
    place = f'x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}"'
    parts = [f'<rect class="{box.kind}" {place} rx="6"/>']
    if box.title:
        parts.append(draw_text(box.x + 10, box.y + 20, box.title, "title"))
    top = box.y + (38 if box.title else 20)
    for row, line in enumerate(box.lines):
        parts.append(draw_text(box.x + 10, top + 16 * row, line))
    return "".join(parts)


def draw_text(x: int, y: int, text: str, kind: str = "note", anchor: str = "start") -> str:
    """One line of text that begins at x, or ends there, or has its middle there."""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x}" y="{y}"{where}>{escape(text)}</text>'


def draw_lines(x: int, y: int, lines: Iterable[str]) -> str:
    """Several lines of text below each other."""
    return "".join(draw_text(x, y + 16 * row, line) for row, line in enumerate(lines))


def draw_arrow(*points: tuple[int, int]) -> str:
    """A line through the points, with a head at the last."""
    return f'<path class="arrow" d="{path_through(points)}"/>'


def draw_line(*points: tuple[int, int]) -> str:
    """A line through the points."""
    return f'<path class="line" d="{path_through(points)}"/>'


def path_through(points: Iterable[tuple[int, int]]) -> str:
    """The points as the path of a line."""
    return "M" + " ".join(f"{x} {y}" for x, y in points)


def page(height: int, label: str, parts: Iterable[str]) -> str:
    """The SVG of all parts; `label` is what a screen reader says."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
    label = f'aria-label="{escape(label)}">'
    dark = f"@media (prefers-color-scheme: dark) {{{RULES.format(**DARK)}}}"
    style = f"<style>{RULES.format(**LIGHT)}{dark}</style><defs>{HEAD}</defs>"
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>'
    return f"{head}{label}{style}{ground}{''.join(parts)}</svg>\n"
