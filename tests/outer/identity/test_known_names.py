"""A name belongs to the first key that used it."""

import pytest

from outer.errors import InputError
from outer.identity import known_names
from outer.identity.known_names import MAX_NAMES, KnownNames, guest_name

KEY, OTHER = "a" * 64, "b" * 64


def test_a_name_belongs_to_the_first_key_that_used_it():
    names = KnownNames()
    assert names.claim("island-1", KEY) == ""
    assert names.claim("island-1", KEY) == ""
    assert "'island-1' belongs to the key aaaa" in names.claim("island-1", OTHER)
    assert names.claim("island-1", KEY) == ""
    assert (names.key_of("island-1"), names.key_of("island-2")) == (KEY, None)


def test_a_restart_does_not_forget(tmp_path):
    names = KnownNames(tmp_path / "names.json")
    names.claim("island-1", KEY)
    names.is_newest("island-1", 17)
    names.save()
    again = KnownNames(tmp_path / "names.json")
    assert again.claim("island-1", OTHER) != ""
    assert (again.key_of("island-1"), again.newest("island-1")) == (KEY, 17)


def test_a_kill_forgets_no_name_that_was_known_for_a_second(tmp_path, monkeypatch):
    monkeypatch.setattr(known_names, "SAVE_SECONDS", 0.0)
    names = KnownNames(tmp_path / "names.json")
    names.claim("island-1", KEY)
    names.claim("island-2", OTHER)
    assert KnownNames(tmp_path / "names.json").key_of("island-2") == OTHER


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"key": "xyz", "time": 1}}'])
def test_a_file_that_is_damaged_is_refused_with_a_cure(tmp_path, text):
    (tmp_path / "names.json").write_text(text)
    with pytest.raises(InputError, match=r"names\.json: .*remove it"):
        KnownNames(tmp_path / "names.json")


def test_many_names_push_out_only_those_that_are_not_used():
    names = KnownNames()
    names.claim("absent", KEY)
    for number in range(2 * MAX_NAMES):
        names.claim("island-1", KEY)
        names.claim(f"x{number}", OTHER)
    assert (names.key_of("island-1"), names.key_of("absent"), names.key_of("x0")) == (
        KEY,
        None,
        None,
    )


def test_an_old_record_is_recognised():
    names = KnownNames()
    names.claim("island-1", KEY)
    assert [names.is_newest("island-1", t) for t in (5, 9, 9, 8)] == [True, True, True, False]
    assert not names.is_newest("unknown", 1)


def test_a_guest_has_the_name_of_its_key():
    names = KnownNames()
    assert names.claim(guest_name(KEY), KEY) == ""
    assert "guest with another key" in names.claim(guest_name(KEY), OTHER)
    assert names.key_of(guest_name(KEY)) is None


def test_a_rank_takes_what_its_leader_knows():
    names = KnownNames()
    names.claim("island-1", OTHER)
    names.adopt({"island-1": KEY})
    assert names.key_of("island-1") == KEY
