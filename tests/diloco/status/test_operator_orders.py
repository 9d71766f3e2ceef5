"""Orders to an island: carried out for a listed operator, once, and refused otherwise."""

from pathlib import Path

import pytest

from diloco.status.operator_orders import FRESH_MS, Order, OrderServer, OrderText, sign_order
from outer.errors import MessageError
from outer.identity.island_key import IslandKey

OPERATOR, STRANGER = IslandKey(b"o" * 32), IslandKey(b"s" * 32)
NOW = 1_800_000_000.0


class Place:
    """An island's server of orders and what it has noted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder / "island-1", []
        note = lambda name, text: self.notes.append((name, text))  # noqa: E731
        self.server = OrderServer("run", self.folder, [OPERATOR.public], note)

    def carry_out(self, order: Order) -> str:
        return self.server.carry_out(order, NOW)


def text(**changes) -> OrderText:
    values = {
        "run": "run",
        "island": "island-1",
        "action": "save",
        "argument": "",
        "time": round(1000 * NOW),
    }
    return OrderText(**values | changes)


def order(key: IslandKey = OPERATOR, **changes) -> Order:
    return sign_order(text(**changes), key)


@pytest.mark.parametrize(
    ("action", "argument", "file", "content"),
    [
        ("save", "", "save-now", ""),
        ("stop", "", "stop-after-round", ""),
        ("stop", "120", "stop-after-round", "120"),
        ("exclude", "ab" * 32, "banned", "ab" * 32),
    ],
)
def test_an_order_makes_the_file_that_an_operator_would_make(
    tmp_path: Path, action: str, argument: str, file: str, content: str
) -> None:
    place = Place(tmp_path)
    assert place.carry_out(order(action=action, argument=argument))
    assert (place.folder / file).read_text().partition("  #")[0] == content
    assert place.notes == [("ordered", f"{OPERATOR.public[:16]}: {action} {argument}".rstrip())]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (order(STRANGER), "is no operator of this island"),
        (order().model_copy(update={"text": order(action="stop").text}), "signature is wrong"),
        (order(STRANGER).model_copy(update={"operator": OPERATOR.public}), "signature is wrong"),
        (order(run="other"), "signature is wrong"),
        (order(island="island-2"), "is for island-2"),
        (order(time=round(1000 * NOW) - FRESH_MS - 1), "differs by 60 s"),
        (order(time=round(1000 * NOW) + FRESH_MS + 1), "differs by 60 s"),
        (order(action="stop", argument="soon"), "allowed: a number of rounds"),
        (order(action="exclude"), "name or key is missing"),
    ],
)
def test_any_other_order_is_refused_and_does_nothing(
    tmp_path: Path, wrong: Order, why: str
) -> None:
    place = Place(tmp_path)
    with pytest.raises(MessageError, match=why):
        place.carry_out(wrong)
    assert not place.notes and not list(place.folder.glob("*"))


def test_an_order_is_carried_out_once(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.carry_out(order())
    with pytest.raises(MessageError, match="not newer"):
        place.carry_out(order())
    place.carry_out(order(time=round(1000 * NOW) + 1))


def test_an_argument_cannot_name_more_than_one_island() -> None:
    with pytest.raises(ValueError, match="argument"):
        text(action="exclude", argument="a\nb")
