"""Hooks of mkdocs: pages that are made, and links to files beside docs/, which a site does not
have.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(
    0, str(Path(__file__).parents[1])
)  # mkdocs takes it away again when this file is read

from scripts import docs_settings, docs_tutorials

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./(?!\.\./)[^)]*\)")
TUTORIAL = re.compile(r"\(((?:\.\./)?tutorials/\w+)\.py\)")
PICTURE = re.compile(r'<img alt="[^"]*" src="([^"]+\.png)" ?/?>')
API = {
    "A training loop of your own": (
        "diloco.own_loop.islands.Islands",
        "diloco.own_loop.huggingface.IslandsCallback",
        "diloco.own_loop.fabric.IslandsCallback",
        "outer.report.RoundReport",
    ),
    "Code of your own, named in a config": (
        "inner.optim.own_optimizer",
        "inner.data.sources.own_source",
        "inner.parallel.own_model",
    ),
    "The seam between inside and outside": (
        "inner.params.LocalParams",
        "inner.param_spec.ParamSpec",
        "inner.param_spec.ParamSlice",
    ),
    "Families of interchangeable parts": (
        "outer.codecs.base.Codec",
        "outer.merges.base.Merge",
        "outer.transports.base.Transport",
    ),
}
"""What the page of the Python API shows; a module is shown by its docstring alone."""
COMMAND = re.compile(r"^## `diloco ([\w-]+)`$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from the program, from the decisions, and from the tutorials."""
    files.append(File.generated(config, "commands.md", content=commands_page()))
    files.append(File.generated(config, "api.md", content=api_page()))
    files.append(
        File.generated(
            config, "decisions/index.md", content=decisions_page(ROOT / "docs" / "decisions")
        )
    )
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.py")):
        content = docs_tutorials.page_of(path)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep the words of a link out of docs/ and drop the link; lead links to a tutorial to its
    page.
    """
    markdown = TUTORIAL.sub(r"(\1.md)", markdown)
    if page.file.src_uri == "settings.md":
        markdown = docs_settings.split_by_section(markdown)
    return OUTSIDE.sub(r"\1", markdown) if "/" not in page.file.src_uri else markdown


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Make the settings readable on a phone, and plots lead to themselves, so that a tap shows them
    at full size.
    """
    html = PICTURE.sub(r'<a href="\1">\g<0></a>', html)
    return docs_settings.name_cells(html) if page.file.src_uri == "settings.md" else html


def decisions_page(folder: Path) -> str:
    """The titles of all decisions."""
    titles = [
        (path.name, path.read_text().splitlines()[0].removeprefix("# "))
        for path in sorted(folder.glob("0*.md"))
    ]
    return "# Decisions\n\n" + "\n".join(f"- [{title}]({name})" for name, title in titles) + "\n"


def api_page() -> str:
    """Classes and protocols, to be filled in from their docstrings by mkdocstrings."""
    lines = [
        "# Python API",
        "Made from the docstrings. `diloco.Islands` is used as [library](library.md) says, own "
        "code as",
        "[extending](extending.md) says. The classes of the last two sections are what the parts "
        "of this project agree",
        "on among themselves: they may change with any release, and the CHANGELOG says so.",
    ]
    for title, names in API.items():
        lines.append(f"\n## {title}\n")
        for name in names:
            is_module = name.rsplit(".", 1)[1].islower()
            members = "\n    options:\n      members: false" if is_module else ""
            lines.append(f"::: {name}{members}\n")
    return "\n".join(lines)


def commands_page() -> str:
    """All commands with their options, as typer describes them, without those that only other
    commands start.
    """
    from diloco.cli.main import app

    hidden = {
        each.callback.__name__
        for each in app.registered_commands
        if each.hidden and each.callback is not None
    }
    words = [sys.executable, "-m", "typer", "diloco.cli.main", "utils", "docs", "--name", "diloco"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    begin, *sections = re.split(r"(?m)^(?=## `diloco )", done.stdout)
    kept = [each for each in sections if COMMAND.match(each.splitlines()[0])[1] not in hidden]  # type: ignore[index]
    begin = "\n".join(
        line
        for line in begin.splitlines()
        if not line.startswith(tuple(f"* `{name}`" for name in hidden))
    )
    return begin.replace("# `diloco`", "# Commands", 1) + "\n\n" + "".join(kept)
