"""Words and phrases that were hard to understand at first reading do not occur in public text.

Checked are the pages, the help texts and docstrings of the commands, and the descriptions of the
settings. Code blocks, code spans and link targets are left out.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from typer.main import get_command

from diloco.cli.main import app
from diloco.config.reference import list_settings

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("log.md", "settings.md")
"""Entries of the log stay as they were written. The page of settings repeats the descriptions that
are checked.
"""
FENCED_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
INDENTED_BLOCK = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n)+")
"""Indented lines after a blank line. Without the blank line they continue an item of a list."""
CODE_SPAN = re.compile(r"`[^`]+`")
LINK_TARGET = re.compile(r"\]\([^)]*\)")
PER = "step|round|second|element|parameter|token|rank|layer|island|micro-batch|payload|run|machine"
PER += "|participant"
COUNTED = "once|twice|times|tokens|bytes|steps|seconds|GB|MB|core-minutes"
PRIVATE_WORDS = r"\b(dis)?believed?\b|\bdoubt(s|ed)?\b|\bamnesty\b|\bstands? behind\b"
"""The glossary may name these, as identifiers of the code."""
UNCLEAR = (
    r"\banew\b",
    r"\bin vain\b",
    r"\bcalm\b",
    r"\bthat much\b",
    r"\bmeanwhile\b",
    r"\bheld up\b",
    r"\bholds? (it|them|both|all) up\b",
    r"\basked (of|for)\b",
    r"\b(is|are|was|were|been) asked\b",
    r"\b(is|are|was|were|been|gets?) told\b",
    r"\btells? (it|them|others)\b",
    r"\bwhom\b",
    r"\bas (ever|before)\b",
    r"\bby itself\b",
    rf"\b({COUNTED}) an? ({PER})\b",
    r"\bhang guard\b",
    r"\bnats a token\b",
    PRIVATE_WORDS,
)


def strip_code(markdown: str) -> str:
    """Return the text of a page without code blocks, code spans and link targets."""
    for pattern in (FENCED_BLOCK, INDENTED_BLOCK, CODE_SPAN):
        markdown = pattern.sub(" ", markdown)
    return LINK_TARGET.sub("]", markdown)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each page."""
    for page in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ):
        if page.name not in LEFT_OUT:
            yield page.name, strip_code(page.read_text())


def commands() -> Iterator[tuple[str, str]]:
    """Yield the name and the help texts of each command and of its options."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        texts = [
            command.help,
            command.epilog,
            *(getattr(option, "help", None) for option in command.params),
        ]
        yield f"diloco {name}", CODE_SPAN.sub(" ", "\n".join(text for text in texts if text))


def settings() -> Iterator[tuple[str, str]]:
    """Yield the key and the description of each setting."""
    for setting in list_settings():
        yield setting.key, CODE_SPAN.sub(" ", setting.meaning)


def find_unclear(name: str, text: str) -> list[str]:
    """Return the unclear words of a text, each with the name of the text."""
    words = " ".join(text.split())
    patterns = [pattern for pattern in UNCLEAR if pattern != PRIVATE_WORDS or name != "glossary.md"]
    return [
        f"{name}: {found[0]}"
        for pattern in patterns
        for found in re.finditer(pattern, words, re.IGNORECASE)
    ]


def test_public_text_has_no_unclear_words() -> None:
    texts = [*pages(), *commands(), *settings()]
    assert {"README.md", "protocol.md", "diloco mesh", "outer.inner_steps"} <= {
        name for name, _ in texts
    }
    unclear = [found for name, text in texts for found in find_unclear(name, text)]
    assert not unclear, "\n".join(unclear)
