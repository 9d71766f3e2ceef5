"""Islands whose text differs are told so when they meet."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from diloco.config.schema import Config
from diloco.runtime.text_print import MAX_WINDOWS, WINDOW_TOKENS, text_print
from diloco.train import train
from inner.data.corpus import Corpus, Text
from outer.membership.base import TextPrint
from tests.diloco.own_loop.test_data import train_bigram
from tests.swarm import swarm

TRAIN = np.arange(3000) % 251


def corpus(train: np.ndarray = TRAIN, **changes: Any) -> Corpus:
    text = Text(train.astype(np.uint16), np.arange(9, dtype=np.uint16), 9)
    return Corpus((replace(text, **changes),), 260, 0)


def test_the_print_of_a_text_does_not_depend_on_the_width_of_its_ids() -> None:
    wide = corpus(train=TRAIN.astype(np.uint32))
    assert text_print(wide) == text_print(corpus())
    assert str(text_print(wide)).startswith("3,009 tokens with digest ")


@pytest.mark.parametrize("place", [0, 1500, 2999])
def test_the_print_changes_with_any_token_of_a_text(place: int) -> None:
    train = TRAIN.copy()
    train[place] += 1
    assert text_print(corpus(train)) != text_print(corpus())


def test_of_a_long_text_windows_are_compared_from_its_begin_to_its_end() -> None:
    train = np.zeros(3 * WINDOW_TOKENS * MAX_WINDOWS // 2, np.uint16)
    whole = text_print(corpus(train))
    for place in (0, len(train) // 2, len(train) - 1024):
        changed = train.copy()
        changed[place : place + 1024] = 1
        assert text_print(corpus(changed)) != whole


def test_sources_that_only_some_islands_have_are_not_compared() -> None:
    assert text_print(corpus(reader=(0, 1))) is None


@pytest.mark.parametrize(
    "fields", [{"tokens": 1 << 62}, {"tokens": -1}, {"digest": "0" * 65}, {"digest": "x" * 32}]
)
def test_the_print_of_a_stranger_is_bounded(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TextPrint(**{"tokens": 1, "digest": "0" * 32} | fields)


def logging_train(config: Config, index: int) -> None:
    logging.basicConfig(force=True)
    train(config, index)


def logging_loop(config: Config, index: int) -> None:
    logging.basicConfig(force=True)
    if paths := config.for_island(index).data_paths:
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"paths": list(paths)})}
        )
    train_bigram()(config, index)


@pytest.mark.parametrize("work", [logging_train, logging_loop])
@pytest.mark.parametrize("is_same", [False, True])
def test_islands_whose_text_differs_each_say_so_in_one_line(
    tmp_path: Path, work: Any, is_same: bool
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with swarm(tmp_path, "outer.rounds=4", islands=[{}, {"data_paths": [str(other)]}]) as made:
        for path in (tmp_path / "text").iterdir():
            (other / path.name).write_text(
                path.read_text() + "" * is_same + "\nmore" * (not is_same)
            )
        for island in made.start_all(work):
            island.finish()
        logs = [island.log for island in made.started]
    for here, log in enumerate(logs):
        line = f"the text of island-{1 - here} differs from this island's: "
        assert log.count(line) == (0 if is_same else 1)
