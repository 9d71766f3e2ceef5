"""A command that prints nothing for long says that it is alive."""

import time

import pytest

from diloco.cli.main import telling_of
from diloco.watchdog import life_signs as module
from diloco.watchdog.life_signs import life_signs

GUARD_SECONDS = 60.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(module, "NEXT_SECONDS", 0.01)


def said_within(capfd: pytest.CaptureFixture[str], text: str) -> str:
    """Wait for a line with this text on stderr, and return what was written until then."""
    deadline = time.monotonic() + GUARD_SECONDS
    said = ""
    while text not in said:
        assert time.monotonic() < deadline, f"nobody wrote {text!r}: {said}"
        time.sleep(0.01)
        said += capfd.readouterr().err
    return said


def test_lines_tell_what_is_done_and_how_much_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    with life_signs("counting", lambda: 0.5):
        said = said_within(capfd, "to go")
    assert said.startswith("counting: 0 s so far, 50 % done, about 0 s to go")


def test_a_part_of_the_work_tells_of_itself_while_it_lasts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with life_signs("all"):
        said_within(capfd, "all: ")
        with life_signs("the part"):
            said_within(capfd, "the part: ")
        said_within(capfd, "all: ")


@pytest.mark.parametrize(
    "line", ["mesh Q.yaml --dry-run", "simulate Q.yaml --virtual", "status tcp://h:1", "plan Q"]
)
def test_commands_without_output_before_their_result_tell_that_they_are_alive(
    line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with telling_of(line.split()):
        said_within(capfd, "s so far")


@pytest.mark.parametrize("line", ["", "simulate Q.yaml", "watch runs/Q", "mesh --help"])
def test_other_commands_are_left_alone(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with telling_of(line.split()):
        time.sleep(0.05)
    assert capfd.readouterr().err == ""
