"""Who may take part: the list of the config, and files that are read again."""

import os

import pytest

from outer.identity import access
from outer.identity.access import Access

KEY, OTHER = "a" * 64, "b" * 64


def test_an_empty_list_allows_all():
    assert Access().ban("island-1", KEY) == ""
    assert Access().is_allowed(KEY)
    assert Access().may_connect("Qm1")


def test_a_list_allows_keys_and_peer_ids():
    listed = Access(allow=frozenset({KEY, "Qm1"}))
    assert listed.is_allowed(KEY, "Qm2")
    assert listed.is_allowed(OTHER, "Qm1")
    assert not listed.is_allowed(OTHER, "Qm2")
    assert not listed.is_allowed(OTHER)
    assert listed.may_connect("Qm2"), "its key may be on the list"
    assert not Access(allow=frozenset({"Qm1"})).may_connect("Qm2")


@pytest.mark.parametrize("word", ["island-1", KEY, "Qm1"])
def test_a_ban_counts_from_its_line_in_the_file_to_its_removal(tmp_path, monkeypatch, word):
    monkeypatch.setattr(access, "REREAD_SECONDS", 0.0)
    banned = tmp_path / "banned"
    who = Access(files=[tmp_path / "none", banned])
    assert who.ban("island-1", KEY, "Qm1") == ""
    banned.write_text(f"# notes\n\n{word} # it sent nan\n")
    assert f"names {word}" in who.ban("island-1", KEY, "Qm1")
    assert who.ban("island-2", OTHER, "Qm2") == ""
    banned.unlink()
    assert who.ban("island-1", KEY, "Qm1") == ""


def test_a_file_is_looked_at_once_in_a_while_only(tmp_path):
    who = Access(files=[tmp_path / "banned"])
    assert who.banned() == frozenset()
    (tmp_path / "banned").write_text("island-1\n")
    assert who.banned() == frozenset()


def test_a_file_that_is_too_long_or_no_text_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(access, "REREAD_SECONDS", 0.0)
    (tmp_path / "banned").write_bytes(os.urandom(100) + b"\nisland-1\n")
    who = Access(files=[tmp_path / "banned"])
    assert who.ban("island-1", KEY) != ""
    (tmp_path / "banned").write_bytes(b"x" * ((1 << 20) + 1))
    assert who.ban("island-1", KEY) == ""
