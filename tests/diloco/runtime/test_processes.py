"""What a child process has said before its end."""

import sys
from pathlib import Path

from diloco.runtime.processes import start, stop


def error_excerpt(folder: Path, text: str) -> str:
    child = start("child", [sys.executable, "-S", "-c", f"print({text!r}, end='')"], folder / "log.txt")
    child.process.wait(60)
    stop([child])
    return child.error_excerpt()


def test_the_excerpt_is_the_error_message_not_what_others_write_below(tmp_path) -> None:
    text = "error: of a life before\nstep 1\nerror: no such device\n  use cpu\n" + "Traceback of another rank\n" * 30
    assert error_excerpt(tmp_path, text) == "error: no such device\n  use cpu"


def test_without_an_error_they_are_the_last_lines(tmp_path) -> None:
    assert error_excerpt(tmp_path, "".join(f"{n}\n" for n in range(40))) == "\n".join(map(str, range(25, 40)))
