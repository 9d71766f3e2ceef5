"""Find the own code that a run's config names by import paths, and hash it for comparison. Does not
import torch.
"""

from collections.abc import Sequence
from pathlib import Path

from diloco.config.schema import Config, RunConfig, load_config
from diloco.errors import ConfigError
from inner.config import DataConfig
from inner.errors import InputError
from inner.import_path import is_import_path, load, source_sha256
from outer.own_code import provide


def own_code(run: RunConfig) -> list[tuple[str, str]]:
    """Return (key, import path) of all own code that the run names."""
    outer = run.outer
    named = [("optimizer.name", run.optimizer.name), ("model.name", run.model.name or "")]
    named += [("outer.codec", outer.codec), ("outer.merge.rule", outer.merge.rule)]
    named += [("outer.optimizer.rule", outer.optimizer.rule or "")]
    for entry, source in named_sources(run.data):
        named.append(
            ("data.source" if entry is None else f"data.mixture, {entry}: source", source.source)
        )
    return [(key, name) for key, name in named if is_import_path(name)]


def named_sources(data: DataConfig) -> list[tuple[str | None, DataConfig]]:
    """Return the sources of a run with their names in the mixture; the name is None for a single
    source.
    """
    names = [entry.name for entry in data.mixture] or [None]
    return list(zip(names, data.sources, strict=True))


def is_allowed(path: str, allowed: tuple[str, ...]) -> bool:
    """Return whether an import path, its module, or a package that contains the module is in
    `allowed`.
    """
    module = path.partition(":")[0]
    return any(entry == path or f"{module}.".startswith(f"{entry}.") for entry in allowed)


def check_allowed(code: list[tuple[str, str]], allowed: tuple[str, ...], cure: str) -> None:
    """Raise ConfigError if another person's config names code that is not in `allowed`. `cure`
    precedes the path.
    """
    for key, path in code:
        if not is_allowed(path, allowed):
            raise ConfigError(
                f"{key}: the run uses {path!r}. Its config does not say which code this machine "
                "runs: if you have that "
                f"code from a place that you trust, and installed it here, {cure}{path}"
            )


def add_code_hashes(run: RunConfig) -> RunConfig:
    """Return the run with the hashes of the own code on this machine. It imports that code. Raises
    ConfigError.
    """
    try:
        hashes = {path: source_sha256(path, key) for key, path in own_code(run)}
    except InputError as error:
        raise ConfigError(str(error)) from None
    return run.model_copy(update={"code_sha256": hashes})


def provide_own_code(run: RunConfig) -> None:
    """Import those of the run's codec, merge rule and outer optimizer that are own code, for
    outer/. Raises ConfigError.

    The config must be the operator's own, or have passed `check_allowed`.
    """
    try:
        for key, path in outer_code(run):
            provide(path, load(path, key))
    except InputError as error:
        raise ConfigError(str(error)) from None


def load_own_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the operator's own config and import the own code that outer/ needs. Raises
    ConfigError.
    """
    config = load_config(path, overrides)
    provide_own_code(config.run)
    return config


def outer_code(run: RunConfig) -> list[tuple[str, str]]:
    """Return (key, import path) of those of the run's codec, merge rule and outer optimizer that
    are own code.
    """
    return [(key, path) for key, path in own_code(run) if key.startswith("outer.")]


def find_other_code(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """Return the import paths whose file here differs from the file of the island that published
    `theirs`.
    """
    mine = ours.code_sha256
    others = theirs.code_sha256
    return [path for path in mine if path in others and mine[path] != others[path]]
