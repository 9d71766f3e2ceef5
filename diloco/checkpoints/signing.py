"""Signatures of checkpoints: a run with a run key signs its manifests with it, and reads no others."""

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
    """Signs manifests with the run key. Without a key it signs nothing, and reads manifests that nobody has signed."""

    key: RunKey | None = None
    accept_unsigned: bool = False
    """Read manifests without a signature, or with one that this key did not make."""
    key_setting: str = "--run-key-file"
    accept_setting: str = "--accept-unsigned"

    def sign(self, manifest: bytes) -> bytes:
        """The manifest behind a line with its signature, or as it is if there is no key."""
        return seal(self.key, PURPOSE, manifest)

    def check(self, raw: bytes, where: str) -> bytes:
        """The manifest without its signature. Raises InputError if the signature is missing, or not of this key."""
        try:
            return unseal(self.key, PURPOSE, raw)
        except MessageError as error:
            if self.accept_unsigned:
                _warn_once(f"{where}: {error}; it is read all the same, as {self.accept_setting} asks")
                return strip_seal(raw)
            raise InputError(
                f"{where}: refused: {error}. Name the run's key with {self.key_setting}. If you know where the "
                f"checkpoint is from, for example from before the run had this key, {self.accept_setting} reads it "
                "unchecked"
            ) from None


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def island_signer(island: IslandConfig) -> RunKeySigner:
    """The signer of an island's own checkpoints. Raises InputError of `outer` if its key cannot be read."""
    key, accept = load_run_key(island.run_key_file), island.checkpoint.accept_unsigned
    return RunKeySigner(key, accept, "island.run_key_file", "island.checkpoint.accept_unsigned=true")


@dataclass(frozen=True)
class SignatureOptions:
    """How the commands that read a run's weights check signatures."""

    run_key_file: Path | None = None
    """None takes the file that the config in the run's folder names, if any."""
    accept_unsigned: bool = False

    def build_signer(self, island: IslandConfig | None) -> RunKeySigner:
        """The signer to read the checkpoints of a run with, whose first island has this config, if it is known."""
        named = str(self.run_key_file) if self.run_key_file is not None else island and island.run_key_file
        # A key that is not at hand is no reason to refuse what may be read unchecked.
        key = None if self.accept_unsigned and self.run_key_file is None else load_run_key(named)
        return RunKeySigner(key, self.accept_unsigned)
