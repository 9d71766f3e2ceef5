"""From a config to the source it names."""

from collections.abc import Callable

from inner.config import DataConfig
from inner.data.documents import Source
from inner.data.source_files import FilesSource
from inner.data.source_huggingface import HuggingFaceSource
from inner.data.source_stdlib import stdlib_source
from inner.errors import InputError


def build_source(config: DataConfig) -> Source:
    """The source of `config`; reads nothing yet. InputError: settings that do not fit together."""
    return BUILDERS[config.source](config)


def _huggingface(config: DataConfig) -> HuggingFaceSource:
    if config.dataset is None:
        raise InputError("data.source=huggingface needs data.dataset, got none; for example allenai/c4")
    if config.max_tokens is None:
        raise InputError(
            f"data.source=huggingface streams {config.dataset!r} and needs data.max_tokens to know where to stop, "
            "got none; for example data.max_tokens=50000000"
        )
    return HuggingFaceSource(config.dataset, config.dataset_config, config.split, config.text_field)


BUILDERS: dict[str, Callable[[DataConfig], Source]] = {
    "python-stdlib": lambda config: stdlib_source(),
    "files": lambda config: FilesSource(tuple(config.paths), config.text_field),
    "huggingface": _huggingface,
}
