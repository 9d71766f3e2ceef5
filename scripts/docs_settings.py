"""The page of all settings as the site shows it: a heading for each section, and cells that a phone
can stack.
"""

import re

ROW = re.compile(r"^\| `([\w.\[\]]+)` \|.*$")
CELL = re.compile(r"<td>(.*?)</td>", re.DOTALL)
HEADS = ("", "allowed", "default", "")
"""What stands before a cell on a phone, where the table has no head; the key and the meaning need
nothing.
"""


def split_by_section(markdown: str) -> str:
    """The page with one table for each section of a config in place of its one long table."""
    lines = markdown.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| key "))
    head = lines[first : first + 2]
    tables: dict[str, list[str]] = {}
    for line in lines[first + 2 :]:
        row = ROW.match(line)
        assert row is not None, f"this is no row of the table of settings: {line}"
        tables.setdefault(section_of(row[1]), []).append(line)
    result = lines[:first]
    for section, rows in tables.items():
        result += ["", f"## {section}", "", *head, *rows]
    return "\n".join(result) + "\n"


def section_of(key: str) -> str:
    """The heading under which a key stands."""
    name = key.split(".")[0].removesuffix("[]")
    return f"Section {name}" if "." in key or name in ("islands", "stages") else "The run"


def name_cells(html: str) -> str:
    """The page's HTML, each row's cells with what they are, and keys that break where a reader
    expects it.
    """
    rows = [name_cells_of_row(row) for row in re.split(r"(?=<tr>)", html)]
    return f'<div class="settings">{"".join(rows)}</div>'


def name_cells_of_row(row: str) -> str:
    """One row's HTML with the heads of its cells."""
    heads = iter(HEADS)
    return CELL.sub(lambda cell: name_cell(cell[1], next(heads)), row)


def name_cell(content: str, head: str) -> str:
    """One cell with its head."""
    if head:
        return f'<td data-head="{head}">{content}</td>'
    if content.startswith("<code>") and content.endswith("</code>") and " " not in content:
        content = re.sub(r"(?<=[._])(?=\w)", "<wbr>", content)
    return f"<td>{content}</td>"
