"""Every mistake in mistakes.txt ends with an error that names the place and the cure, and without a
traceback.
"""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.cli import main as cli

ROOT = Path(__file__).parents[3]


def _mistakes() -> Iterator[tuple[str, int, list[str]]]:
    """Yield command, exit status and the texts that the error must have."""
    lines = Path(__file__).with_name("mistakes.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        status, _, command = first.split(" ", 2)
        yield command, int(status), [text.strip() for text in second.split(" | ")]


MISTAKES = list(_mistakes())
FILES = {
    "tab.yaml": "name: x\nmodel:\n\tpreset: 1m\n",
    "twice.yaml": "outer: {rounds: 4}\nouter: {rounds: 5}\n",
    "list.yaml": "- a\n- b\n",
    "empty.yaml": "",
    "deep.yaml": "a: " + "[" * 3000,
    "have.yaml": "name: have\n",
    "baseless.yaml": "name: rates\naxes: [{optimizer.lr: [1, 2]}]\n",
    "rates.yaml": "name: rates\nbase: Q.yaml\naxes: [{optimizer.lr: [1e-3, 2e-3]}]\n",
    "axes.yaml": "name: rates\nbase: Q.yaml\naxes: {optimizer.lr: [1, 2]}\n",
    "zipped.yaml": "name: rates\nbase: Q.yaml\naxes: [{optimizer.lr: [1, 2], seed: [1]}]\n",
}


class _Ended(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files that the mistakes are about."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    quickstart = (ROOT / "configs/quickstart.yaml").read_text()
    for name in ("Q.yaml", "quickstart.yaml"):
        (tmp_path / name).write_text(quickstart)
    (tmp_path / "binary.yaml").write_bytes(bytes([0xFF, 0xFE, 0x00]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path


def _run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the command line in this process. Returns its exit status."""
    statuses = []

    def end(code: int) -> None:
        statuses.append(code)
        raise _Ended

    monkeypatch.setattr(cli, "end", end)
    monkeypatch.setattr(cli, "watch_parent", lambda: None)
    monkeypatch.setattr(sys, "argv", ["diloco", *shlex.split(command)])
    with pytest.raises(_Ended):
        cli.main()
    return statuses[0]


@pytest.mark.parametrize(
    ("command", "status", "says"), MISTAKES, ids=[command for command, *_ in MISTAKES]
)
def test_a_mistake_ends_with_an_error_that_names_place_and_cure(
    command, status, says, folder, monkeypatch, capfd
):
    ended_with = _run(command, monkeypatch)
    printed = capfd.readouterr()
    text = " ".join((printed.out + printed.err).replace("│", " ").split())
    assert ended_with == status
    assert [each for each in says if each not in text] == [], text
    assert "Traceback" not in text


def test_the_list_holds_at_least_sixty_mistakes():
    assert len(MISTAKES) >= 60
