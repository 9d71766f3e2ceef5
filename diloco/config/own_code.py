"""Own code that a run's config names by import paths, and the hashes by which islands compare it. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from diloco.config.schema import Config, RunConfig, load_config
from diloco.errors import ConfigError
from inner.config import DataConfig
from inner.errors import InputError
from inner.import_path import is_import_path, source_sha256
from outer.own_code import allow


def own_code(run: RunConfig) -> list[tuple[str, str]]:
    """(key, import path) of all own code that the run names."""
    outer = run.outer
    named = [("optimizer.name", run.optimizer.name), ("model.name", run.model.name or "")]
    named += [("outer.codec", outer.codec), ("outer.merge.rule", outer.merge.rule)]
    named += [("outer.optimizer.rule", outer.optimizer.rule or "")]
    for entry, source in named_sources(run.data):
        named.append(("data.source" if entry is None else f"data.mixture, {entry}: source", source.source))
    return [(key, name) for key, name in named if is_import_path(name)]


def named_sources(data: DataConfig) -> list[tuple[str | None, DataConfig]]:
    """The sources of a run with their names in the mixture; a single source has none."""
    names = [entry.name for entry in data.mixture] or [None]
    return list(zip(names, data.sources, strict=True))


def is_allowed(path: str, allowed: tuple[str, ...]) -> bool:
    """Whether an import path, or its module or a package of that, is in the list."""
    module = path.partition(":")[0]
    return any(entry == path or f"{module}.".startswith(f"{entry}.") for entry in allowed)


def check_allowed(code: list[tuple[str, str]], allowed: tuple[str, ...], cure: str) -> None:
    """Raise ConfigError if somebody else's config names code that is not in `allowed`. `cure` comes before its path."""
    for key, path in code:
        if not is_allowed(path, allowed):
            raise ConfigError(
                f"{key}: the run uses {path!r}. Its config does not say which code this machine runs: if you have that "
                f"code from a place that you trust, and installed it here, {cure}{path}"
            )


def add_code_hashes(run: RunConfig) -> RunConfig:
    """The run with the hashes of the own code that this machine has, which outer/ may import from here on.

    It imports that code. Raises ConfigError.
    """
    allow_own_code(run)
    try:
        hashes = {path: source_sha256(path, key) for key, path in own_code(run)}
    except InputError as error:
        raise ConfigError(str(error)) from None
    return run.model_copy(update={"code_sha256": hashes})


def allow_own_code(run: RunConfig) -> None:
    """Let outer/ import what the run names. The config is the operator's own, or `check_allowed` has passed it."""
    allow(*outer_code(run))


def load_own_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load the operator's own config, whose code outer/ may import from here on. Raises ConfigError."""
    config = load_config(path, overrides)
    allow_own_code(config.run)
    return config


def outer_code(run: RunConfig) -> list[str]:
    """Import paths of the run's codec, merge rule and outer optimizer, those that are own code."""
    return [path for key, path in own_code(run) if key.startswith("outer.")]


def find_other_code(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """Import paths whose file here differs from that of the island that published `theirs`."""
    mine, others = ours.code_sha256, theirs.code_sha256
    return [path for path in mine if path in others and mine[path] != others[path]]
