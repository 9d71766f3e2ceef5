"""Own code that a run's config names by import paths, and the hashes by which islands compare it. Imports no torch."""

from diloco.config.schema import RunConfig
from diloco.errors import ConfigError
from inner.errors import InputError
from inner.import_path import is_import_path, source_sha256


def own_code(run: RunConfig) -> list[tuple[str, str]]:
    """(key, import path) of all own code that the run names."""
    named = [("optimizer.name", run.optimizer.name)]
    return [(key, name) for key, name in named if is_import_path(name)]


def is_allowed(path: str, allowed: tuple[str, ...]) -> bool:
    """Whether an import path, or its module or a package of that, is in the list."""
    module = path.partition(":")[0]
    return any(entry == path or f"{module}.".startswith(f"{entry}.") for entry in allowed)


def add_code_hashes(run: RunConfig) -> RunConfig:
    """The run with the hashes of the own code that this machine has. It imports that code. Raises ConfigError."""
    try:
        hashes = {path: source_sha256(path, key) for key, path in own_code(run)}
    except InputError as error:
        raise ConfigError(str(error)) from None
    return run.model_copy(update={"code_sha256": hashes})


def find_other_code(ours: RunConfig, theirs: RunConfig) -> list[str]:
    """Import paths whose file here differs from that of the island that published `theirs`."""
    mine, others = ours.code_sha256, theirs.code_sha256
    return [path for path in mine if path in others and mine[path] != others[path]]
