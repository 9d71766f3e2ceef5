"""A run's logbook: who wrote what, what a restart was for, what is configured differently."""

import logging
import multiprocessing
import re

from diloco.config.schema import parse_config
from diloco.records.logbook import MAX_CHARACTERS, Logbook
from inner.files import try_lock


def entries(book):
    return [line.split("** ", 1)[1] for line in book.path.read_text().splitlines()[2:]]


def start(book, *overrides, restart="0", monkeypatch=None):
    config = parse_config("name: run", overrides)
    if monkeypatch is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    book.note_start(config.run, config.for_island(0))


def test_a_first_start_says_with_what(tmp_path):
    book = Logbook(tmp_path / "run", "island-0")
    start(book, "island.ranks=4", "island.mesh.tp=2")
    (entry,) = entries(book)
    run_hash = parse_config("name: run").run.hash
    assert (
        entry.startswith(f"started: config {run_hash}, dp_shard2 x tp2, on ") and "torch 2" in entry
    )
    assert re.match(
        r"# Logbook of run\n\n- \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ \*\*island-0\*\* ",
        book.path.read_text(),
    )


def test_a_restart_says_how_the_island_last_ended_and_what_is_configured_differently(
    tmp_path, monkeypatch
):
    book = Logbook(tmp_path / "run", "island-0")
    start(book)
    book.note("failed", "rank 2: MemoryError: 8 GB")
    Logbook(tmp_path / "run", "island-1").note("left", "the run is done")
    book.note("left", "stopped by a signal")
    start(
        book,
        "optimizer.lr=0.5",
        "island.bootstrap=[tcp://h:1]",
        restart="1",
        monkeypatch=monkeypatch,
    )
    again, cause, change = entries(book)[-3:]
    assert again.startswith("started again: ") and again.endswith(", restart 1")
    assert cause == "cause: it last ended with 'failed: rank 2: MemoryError: 8 GB'"
    assert re.fullmatch(r"config changed: optimizer\.lr: [\d.e-]+ -> 0\.5", change)


def test_an_island_that_was_killed_ended_without_an_entry(tmp_path):
    book = Logbook(tmp_path / "run", "island-0")
    start(book)
    book.note("joined", "round 7")
    start(book)
    assert entries(book)[-1].startswith("cause: it last ended without an entry")
    assert "'joined: round 7'" in entries(book)[-1]


def test_an_entry_is_one_line_of_bounded_length_whatever_its_text(tmp_path):
    book = Logbook(tmp_path / "run", "island-0")
    book.note("failed", "a\nb\x1b[31m" + "c" * 5000)
    lines = book.path.read_text().splitlines()
    assert len(lines) == 3 and len(lines[2]) == MAX_CHARACTERS and "\x1b" not in lines[2]


def write_many(folder, number):
    for k in range(50):
        Logbook(folder, f"island-{number}").note("joined", f"{k} " + "x" * 400)


def test_islands_that_write_at_once_leave_whole_lines(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=write_many, args=(tmp_path / "run", number)) for number in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    head, blank, *lines = (tmp_path / "run" / "LOGBOOK.md").read_text().splitlines()
    assert (head, blank, len(lines)) == ("# Logbook of run", "", 200)
    assert all(
        re.fullmatch(r"- \S+ \S+ \*\*island-\d\*\* joined: \d+ x{400}", line) for line in lines
    )


def test_a_start_names_only_the_packages_that_are_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.records.logbook.PACKAGES", ("torch", "diloco-nowhere"))
    book = Logbook(tmp_path / "run", "island-0")
    start(book)
    (entry,) = entries(book)
    assert re.search(r", Python 3[\d.]+, torch 2\S+$", entry)


def test_a_logbook_that_cannot_be_written_is_one_warning_and_its_entries_are_in_the_log(
    tmp_path, caplog
):
    (tmp_path / "run" / "LOGBOOK.md").mkdir(parents=True)
    book = Logbook(tmp_path / "run", "island-0")
    with caplog.at_level("INFO"):
        start(book)
        book.note("joined", "round 7")
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert "**island-0** joined: round 7" in caplog.messages[1]
    (tmp_path / "run" / "LOGBOOK.md").rmdir()
    book.note("left", "the run is done")
    assert entries(book) == ["left: the run is done"]


def test_a_process_that_stands_still_with_the_lock_holds_up_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco.records.logbook.LOCK_SECONDS", 0.05)
    book = Logbook(tmp_path / "run", "island-0")
    book.note("joined", "round 7")
    with book.path.open("a") as other:
        assert try_lock(other)
        book.note("left", "the run is done")
    assert entries(book) == ["joined: round 7", "left: the run is done"]
