"""What a child process has said before its end."""

import sys
from pathlib import Path

from diloco.processes import start, stop


def last_words(folder: Path, text: str) -> str:
    child = start("child", [sys.executable, "-S", "-c", f"print({text!r}, end='')"], folder / "log.txt")
    child.process.wait(60)
    stop([child])
    return child.last_words()


def test_the_last_words_are_the_error_that_was_told_not_what_torchrun_writes_below(tmp_path) -> None:
    text = "error: of a life before\nstep 1\nerror: no such device\n  use cpu\n" + "Traceback of torchrun\n" * 30
    assert last_words(tmp_path, text) == "error: no such device\n  use cpu"


def test_without_an_error_they_are_the_last_lines(tmp_path) -> None:
    assert last_words(tmp_path, "".join(f"{n}\n" for n in range(40))) == "\n".join(map(str, range(25, 40)))
