"""Actions from the page: asked twice, done by the files that islands read or by signed orders,
noted in the logbook.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")
pytest.importorskip("fastapi")

import httpx

from diloco.records.logbook import LOGBOOK
from diloco.runtime.operator_requests import lock_listener
from diloco.watch.command import Watched, open_views
from diloco.watch.control import Control, FolderHand, Wish
from diloco.watch.server import build_app
from diloco.watch.view.run_view import RunView
from outer.errors import OuterError
from outer.identity.island_key import IslandKey, load_island_key
from tests.diloco.watch.test_watch import get_from, write_island
from tests.faults.waits import until
from tests.swarm import swarm as islands_of

KEY = IslandKey(b"k" * 32)
ENDLESS = "outer.rounds=100000"


@pytest.fixture
def run_dir(tmp_path: Path):
    """A run's folder in which island-0 seems to run, and island-1 does not."""
    for name in ("island-0", "island-1"):
        write_island(tmp_path, name).close()
    (tmp_path / "config.yaml").write_text(
        "name: two\nisland: {bootstrap: ['tcp://10.0.0.1:7'], run_key_file: secret}\n"
    )
    lock = lock_listener(tmp_path / "island-0")
    yield tmp_path
    os.close(lock)


def twice(control: Control, action: str, island: str = "") -> str:
    asked = control.answer(Wish(action=action, island=island))  # pyright: ignore[reportArgumentType]
    return control.answer(Wish(action=action, island=island, confirm=asked["confirm"]))["text"]  # pyright: ignore[reportArgumentType]


def control_of(run_dir: Path) -> Control:
    return Control(FolderHand(run_dir), KEY.public)


@pytest.mark.parametrize(
    ("action", "island", "file"),
    [
        ("save", "", "save-now"),
        ("save", "island-0", "island-0/save-now"),
        ("stop", "", "stop-after-round"),
        ("stop", "island-0", "island-0/stop-after-round"),
        ("exclude", "island-1", "banned"),
    ],
)
def test_an_action_is_done_the_second_time_it_is_asked_for(
    run_dir: Path, action: str, island: str, file: str
) -> None:
    control = control_of(run_dir)
    first = control.answer(Wish(action=action, island=island))  # pyright: ignore[reportArgumentType]
    assert not (run_dir / file).exists() and first["text"]
    assert "island-0" in twice(control, action, island)
    assert (run_dir / file).exists()
    assert (
        f"**operator** control: {KEY.public[:16]}: {action} {island or 'all'}"
        in (run_dir / LOGBOOK).read_text()
    )


@pytest.mark.parametrize(
    ("action", "island"), [("save", "island-1"), ("stop", "island-7"), ("exclude", "")]
)
def test_what_cannot_be_done_is_said(run_dir: Path, action: str, island: str) -> None:
    with pytest.raises(OuterError, match=r"does not run on this machine|choose an island"):
        twice(control_of(run_dir), action, island)


def test_a_word_confirms_one_wish_once(run_dir: Path) -> None:
    control = control_of(run_dir)
    word = control.answer(Wish(action="save"))["confirm"]
    with pytest.raises(OuterError, match="ask again"):
        control.answer(Wish(action="stop", confirm=word))
    with pytest.raises(OuterError, match="ask again"):
        control.answer(Wish(action="save", confirm=word))


def test_an_invitation_is_the_line_that_joins(run_dir: Path) -> None:
    text = control_of(run_dir).answer(Wish(action="invite"))["text"]
    assert text.startswith("diloco join tcp://10.0.0.1:7 --run two island.run_key_file=KEY   # ")


def post(run_dir: Path, body: Any, token: str | None = "secret", **headers: str) -> httpx.Response:
    view = RunView(run_dir)
    view.read()
    app = build_app([view], "secret", control_of(run_dir))
    sent = (
        {"x-diloco-control": "1"}
        | ({} if token is None else {"authorization": f"Bearer {token}"})
        | headers
    )
    return get_from(app, "/act", "POST", content=json.dumps(body), headers=sent)


def test_the_page_may_ask(run_dir: Path) -> None:
    reply = post(run_dir, {"action": "save"})
    assert reply.status_code == 200 and reply.json()["confirm"]


@pytest.mark.parametrize(
    ("body", "changes", "status"),
    [
        ({"action": "save"}, {"token": None}, 403),
        ({"action": "save"}, {"token": "wrong"}, 403),
        ({"action": "save"}, {"x-diloco-control": "0"}, 403),
        ({"action": "save"}, {"host": "elsewhere.example"}, 400),
        ({"action": "erase"}, {}, 422),
        ({"action": "save", "island": "../.."}, {}, 422),
        ({"action": "save", "island": "x" * 5000}, {}, 413),
        ({"action": "exclude"}, {}, 409),
    ],
)
def test_whatever_else_asks_is_refused(
    run_dir: Path, body: Any, changes: dict[str, Any], status: int
) -> None:
    assert post(run_dir, body, **changes).status_code == status
    assert not list(run_dir.glob("**/save-now"))


def test_without_control_there_is_nothing_to_ask(run_dir: Path) -> None:
    app = build_app([RunView(run_dir)], "secret")
    assert (
        get_from(app, "/act", "POST", headers={"authorization": "Bearer secret"}).status_code == 404
    )


def test_islands_obey_their_operator_over_the_network_and_nobody_else(tmp_path: Path) -> None:
    path = tmp_path / "operator.key"
    operators = f"island.operators=[{load_island_key(path).public}]"
    settings = (ENDLESS, "outer.transport=tls", operators, f"island.run_dir={tmp_path / 'runs'}")
    with islands_of(tmp_path, *settings, islands=[{}, {}]) as made:
        islands = made.start_all()
        for island in islands:
            island.wait_for_round(0)
        with open_views(Watched(made.address, [], None, None, tmp_path / "other.key")) as (
            _,
            stranger,
        ):
            assert stranger is not None
            with pytest.raises(OuterError, match="is no operator of this island"):
                twice(stranger, "stop")
        with open_views(Watched(made.address, [], None, tmp_path / "kept", path)) as (_, control):
            assert control is not None
            assert made.address in control.answer(Wish(action="invite"))["text"]
            assert "island-0 leaves after" in twice(control, "stop")
            for island in islands:
                island.finish()
        # Rounds are so short here that an order may come when an island has done one more; it obeys
        # it then.
        ends = [island.events("left")[0].split(";")[0] for island in islands]
        assert ends[0] == ends[1] and "asked to stop after" in ends[0]
        assert all(len(island.events("ordered")) == 1 for island in islands)
        book = (tmp_path / "runs/test" / LOGBOOK).read_text()
        assert book.count("ordered: ") == 2
        until(
            lambda: "control: " in (tmp_path / "kept/test" / LOGBOOK).read_text(),
            "the note",
            *islands,
        )
