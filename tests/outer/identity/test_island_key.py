"""An island's key: what it proves, and the file that keeps it."""

import stat

import pytest

from outer.errors import InputError
from outer.identity.island_key import SIGNATURE_BYTES, IslandKey, load_island_key, verify

KEY, OTHER = IslandKey(b"k" * 32), IslandKey(b"o" * 32)


def test_a_signature_proves_key_purpose_and_body():
    signature = KEY.sign("run/vote", b"yes")
    assert len(signature) == SIGNATURE_BYTES
    assert verify(KEY.public, "run/vote", b"yes", signature)
    assert not verify(OTHER.public, "run/vote", b"yes", signature)
    assert not verify(KEY.public, "run/record", b"yes", signature)
    assert not verify(KEY.public, "run/vote", b"no", signature)
    assert not verify(KEY.public, "run/vot", b"eyes", signature)


@pytest.mark.parametrize("public", ["", "zz", "0" * 63, "0" * 64, "f" * 64, "\u00e9" * 64])
@pytest.mark.parametrize("signature", [b"", b"x" * 63, b"x" * 64])
def test_no_key_or_signature_from_a_peer_raises(public, signature):
    assert not verify(public, "purpose", b"body", signature)


def test_two_islands_share_a_secret_that_nobody_else_can_compute():
    assert KEY.pair_secret(OTHER.public) == OTHER.pair_secret(KEY.public)
    third = IslandKey.generate()
    assert (
        third.pair_secret(KEY.public)
        != third.pair_secret(OTHER.public)
        != KEY.pair_secret(OTHER.public)
    )


@pytest.mark.parametrize("public", ["01" + "0" * 62, "0" * 64])
def test_a_weak_public_key_gives_no_shared_secret(public):
    with pytest.raises(ValueError):
        KEY.pair_secret(public)


def test_a_key_is_made_once_for_this_user_only(tmp_path):
    made = load_island_key(tmp_path / "new" / "island.key")
    assert made.public == load_island_key(tmp_path / "new" / "island.key").public
    assert stat.S_IMODE((tmp_path / "new" / "island.key").stat().st_mode) == 0o600
    assert made.public != load_island_key(tmp_path / "island.key").public
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["island.key"]


@pytest.mark.parametrize(
    "text", ["", "0123", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_a_file_that_is_no_key_is_refused_with_its_name(tmp_path, text):
    (tmp_path / "island.key").write_text(text)
    with pytest.raises(InputError, match=r"island\.key' is no Ed25519 key"):
        load_island_key(tmp_path / "island.key")


def test_a_key_that_others_can_read_is_reported(tmp_path, caplog):
    load_island_key(tmp_path / "island.key")
    (tmp_path / "island.key").chmod(0o644)
    load_island_key(tmp_path / "island.key")
    assert "chmod 600" in caplog.text
