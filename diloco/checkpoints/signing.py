"""Signatures of checkpoints: a run with a run key signs its manifests, and accepts no others."""

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from diloco.config.schema import IslandConfig
from inner.errors import InputError
from outer.errors import MessageError
from outer.network.run_key import RunKey, load_run_key, seal, strip_seal, unseal

log = logging.getLogger(__name__)

PURPOSE = "checkpoint manifest"


@dataclass(frozen=True)
class RunKeySigner:
    """Signs manifests with the run key.

    Without a key it signs nothing, and reads unsigned manifests.
    """

    key: RunKey | None = None
    accept_unsigned: bool = False
    """Also read manifests without a signature, or with one that another key made."""
    key_setting: str = "--run-key-file"
    accept_setting: str = "--accept-unsigned"

    def sign(self, manifest: bytes) -> bytes:
        """Return the manifest after a line with its signature; unchanged if there is no key."""
        return seal(self.key, PURPOSE, manifest)

    def check(self, raw: bytes, where: str) -> bytes:
        """Return the manifest without its signature.

        Raises InputError without a signature of this key.
        """
        try:
            return unseal(self.key, PURPOSE, raw)
        except MessageError as error:
            if self.accept_unsigned:
                _warn_once(f"{where}: {error}; it is read anyway, because of {self.accept_setting}")
                return strip_seal(raw)
            raise InputError(
                f"{where}: refused: {error}. Name the run's key with {self.key_setting}. If you "
                "know where the checkpoint is from, for example from before the run had this key, "
                f"{self.accept_setting} reads it unchecked"
            ) from None


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def island_signer(island: IslandConfig) -> RunKeySigner:
    """Return the signer of an island's own checkpoints.

    Raises `outer`'s InputError if its key is unreadable.
    """
    key = load_run_key(island.run_key_file)
    accept = island.checkpoint.accept_unsigned
    return RunKeySigner(
        key, accept, "island.run_key_file", "island.checkpoint.accept_unsigned=true"
    )


@dataclass(frozen=True)
class SignatureOptions:
    """How the commands that read a run's weights check signatures."""

    run_key_file: Path | None = None
    """None means the file that the config in the run's folder names, if any."""
    accept_unsigned: bool = False

    def build_signer(self, island: IslandConfig | None) -> RunKeySigner:
        """Return the signer that reads a run's checkpoints.

        `island`: the config of its first island, if known.
        """
        named = (
            str(self.run_key_file)
            if self.run_key_file is not None
            else island and island.run_key_file
        )
        # Where unsigned manifests are accepted, a key file that is not here must not prevent
        # reading.
        key = None if self.accept_unsigned and self.run_key_file is None else load_run_key(named)
        return RunKeySigner(key, self.accept_unsigned)
