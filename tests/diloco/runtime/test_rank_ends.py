"""The next life of an island that torchrun has started tells which of its ranks was killed, or
failed first.
"""

from pathlib import Path

import pytest

from diloco.runtime.rank_ends import FAILED, RankEnd, build_rank_end, describe_ends

STOPPED = "left: stopped by a signal"


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RankEnd]:
    """The four ranks of an island of two nodes."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    return [RankEnd(tmp_path, rank) for rank in range(4)]


def test_a_rank_without_a_note_was_killed(ranks: list[RankEnd]) -> None:
    assert ranks[0].begin_life() == ""
    for rank in (0, 1, 3):
        ranks[rank].note(STOPPED)
    assert ranks[0].begin_life().startswith("rank 2 (node 1) ended without a word: killed")
    assert ranks[0].begin_life().startswith("all 4 ranks ended without a word"), (
        "the notes of a life are read once"
    )


def test_ranks_that_were_all_asked_to_end_are_no_failure(ranks: list[RankEnd]) -> None:
    ranks[0].begin_life()
    for rank in ranks:
        rank.note(STOPPED)
    assert ranks[0].begin_life() == ""


def test_a_life_that_ended_as_it_should_leaves_nothing_to_tell(ranks: list[RankEnd]) -> None:
    ranks[0].begin_life()
    ranks[0].end_life()
    assert ranks[0].begin_life() == ""


@pytest.mark.parametrize(
    ("notes", "told"),
    [
        ({0: STOPPED, 1: f"{FAILED}ValueError: x"}, "rank 1 failed: ValueError: x"),
        ({0: f"{FAILED}RankLost: rank 1"}, "rank 1 (node 0) ended without a word"),
        (
            {0: f"{STOPPED}; meanwhile the kernel ended 1 on n0 for lack of memory"},
            "the kernel ended 1 on n0 for lack of memory",
        ),
    ],
)
def test_a_lost_rank_explains_the_failures_of_those_that_waited_for_it(
    notes: dict[int, str], told: str
) -> None:
    assert told in describe_ends(notes, 2, 2)


def test_an_island_of_one_rank_leaves_no_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert build_rank_end(tmp_path) is None
