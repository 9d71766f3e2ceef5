"""Builds the source of documents that a config names."""

from collections.abc import Callable

from inner.config import DataConfig
from inner.data.sources.documents import Source, TextField
from inner.data.sources.files import FilesSource
from inner.data.sources.huggingface import HuggingFaceSource
from inner.data.sources.own_source import build_own_source
from inner.data.sources.stdlib import StdlibSource
from inner.errors import InputError


def build_source(config: DataConfig) -> Source:
    """Build the source of `config` without reading anything. Raises InputError if settings
    contradict each other.
    """
    return BUILDERS.get(config.source, build_own_source)(config)


def _build_huggingface(config: DataConfig) -> HuggingFaceSource:
    if config.dataset is None:
        raise InputError(
            "data.source=huggingface needs data.dataset, got none; for example allenai/c4"
        )
    if config.max_tokens is None:
        raise InputError(
            f"data.source=huggingface streams {config.dataset!r} and needs data.max_tokens to know "
            "where to stop, got none; for example data.max_tokens=50000000"
        )
    return HuggingFaceSource(
        config.dataset, config.dataset_config, config.split, text_field_of(config)
    )


def text_field_of(config: DataConfig) -> TextField:
    """Return the field of a row that `config` reads."""
    is_chat = config.format == "chat"
    is_default = config.text_field == DataConfig.model_fields["text_field"].default
    return TextField("messages" if is_chat and is_default else config.text_field, is_chat)


BUILDERS: dict[str, Callable[[DataConfig], Source]] = {
    "python-stdlib": lambda config: StdlibSource(),
    "files": lambda config: FilesSource(tuple(config.paths), text_field_of(config)),
    "huggingface": _build_huggingface,
}
