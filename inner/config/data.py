"""Config of the text: what is trained on, and what is held out."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from inner.config.section import Section
from inner.errors import nearest_multiples
from inner.import_path import Options, is_import_path, one_of

SOURCES = ("python-stdlib", "files", "tokens", "shards", "huggingface")


class SourceConfig(Section):
    """One source of text."""

    source: Annotated[str, one_of(SOURCES, "my_package.sources:Papers")] = "python-stdlib"
    """Where the text comes from: `python-stdlib` (Python's own source text, for tests), `files`, `tokens`, `shards`
    (what `diloco prepare --into` has written), `huggingface`, or an own source by its import path:
    inner/data/sources/own_source.py."""
    options: Options = Field(default_factory=dict)
    """Arguments of an own source."""
    paths: list[str] = Field(default_factory=list)
    """For `files`: text, .jsonl, .parquet or .tar files, folders, or glob patterns. For `tokens`: token files
    of Megatron, datatrove or OLMo. For `shards`: one folder or URL that fsspec supports (s3://bucket/text). An own
    source gets them as they are."""
    dataset: str | None = None
    """For `huggingface`: the name of the dataset, for example `allenai/c4`."""
    dataset_config: str | None = None
    """For `huggingface`: the configuration of the dataset, for example `en`. null: its only one."""
    split: str = "train"
    """For `huggingface`: the split that is read."""
    text_field: str = "text"
    """Name of the field of a row that holds the text, or the messages of a conversation."""
    format: Literal["text", "chat"] = "text"
    """What a row of .jsonl, .parquet, .tar or a dataset holds: text, or a conversation (`chat`) in the field `messages`
    if `text_field` names no other, with the loss on the assistant's words only."""
    chat_template: Literal["chatml", "llama3"] = "chatml"
    """What stands around the messages of a conversation."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Number of training tokens to read at most. null: all of the text."""

    @model_validator(mode="after")
    def _settings_fit_the_source(self) -> Self:
        if self.options and not is_import_path(self.source):
            raise ValueError(f"options are those of an own source, and source is {self.source}; leave options out")
        if self.source == "shards" and self.max_tokens is not None:
            raise ValueError("max_tokens is set when text is prepared, and shards are prepared; leave it out here")
        if self.format == "chat" and self.source not in ("files", "huggingface"):
            raise ValueError(f"format chat needs rows of the source files or huggingface, and source is {self.source}")
        return self


class MixtureEntry(SourceConfig):
    """One source of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the source in the metrics."""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Relative share of the sequences that are read; the weights need not sum to 1."""
    only: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")], ...] = ()
    """Names of the islands that read the source, and that alone have it. Empty: all of them."""

    def is_read_by(self, island: str) -> bool:
        """Whether the island of this name may read the source."""
        return not self.only or island in self.only


class DataConfig(SourceConfig):
    """The sources of text, and how the text is cut into sequences."""

    mixture: tuple[MixtureEntry, ...] = ()
    """Several sources, mixed by weight. Empty: the single source given by `source` and the keys next to it."""
    tokenizer: str = "bytes"
    """How text becomes tokens: `bytes`, the path of a tokenizer.json, or the name of a tokenizer on the Hugging Face
    hub."""
    eos: str | None = None
    """Name of the token that ends a document. null: the eos_token of the tokenizer_config.json beside the
    tokenizer.json; without one, the first of </s>, <|endoftext|>, <|end_of_text|>, <eos> that the tokenizer has."""
    bos: str | None = None
    """Name of a token that is put before each document. null: none."""
    seq_len: int = Field(default=256, ge=8)
    """Tokens of a sequence."""
    order: Literal["global", "shards"] = "global"
    """`global` shuffles all sequences of the text, which is tokenised first. `shards` shuffles within each shard, in
    the order of the text, so that training begins with the first shard while others are tokenised."""
    shard_tokens: int = Field(default=1 << 22, ge=64)
    """Tokens of a shard where `order` is shards; a multiple of seq_len."""
    document_mask: bool = False
    """Whether attention stays within its document when a sequence holds several documents."""
    heldout_fraction: float = Field(default=0.02, gt=0, lt=1)
    """Share of the text that is never trained on, and on which the loss is evaluated."""

    @model_validator(mode="after")
    def _a_mixture_names_each_source_once(self) -> "DataConfig":
        names = [entry.name for entry in self.mixture]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"mixture has {twice[0]!r} {names.count(twice[0])} times; give each entry its own name")
        plain = SourceConfig()
        also = [key for key in SourceConfig.model_fields if getattr(self, key) != getattr(plain, key)]
        if self.mixture and also:
            raise ValueError(f"mixture has sources of its own: move {', '.join(also)} into its entries")
        return self

    @model_validator(mode="after")
    def _sequences_fill_shards(self) -> "DataConfig":
        if self.order == "shards" and self.shard_tokens % self.seq_len:
            raise ValueError(
                f"shard_tokens: got {self.shard_tokens}, which sequences of {self.seq_len} do not fill; allowed: "
                f"multiples of seq_len, such as {nearest_multiples(self.shard_tokens, self.seq_len)}"
            )
        return self

    @model_validator(mode="after")
    def _own_sources_stay_on_their_islands(self) -> "DataConfig":
        for entry in self.mixture:
            if entry.only and (self.order == "shards" or entry.source == "shards"):
                raise ValueError(
                    f"mixture: {entry.name!r} has `only`, and text in shards may be read from a store by all; leave "
                    "`only` out, or set order to global and another source"
                )
        return self

    def of_island(self, island: str) -> "DataConfig":
        """The data that the island of this name reads. Raises ValueError if there is none for it."""
        here = tuple(entry for entry in self.mixture if entry.is_read_by(island))
        if self.mixture and not here:
            raise ValueError(
                f"data.mixture: no source is for the island {island!r}, as `only` names others in each; add it to one, "
                "or add a source that all islands read"
            )
        return self.model_copy(update={"mixture": here})

    @property
    def tokenizer_choice(self) -> tuple[str, str | None, str | None]:
        """The tokenizer and the names of its eos and bos, which `build_tokenizer` takes."""
        return self.tokenizer, self.eos, self.bos

    @property
    def owners(self) -> tuple[str, ...]:
        """The islands that have sources which not all islands read."""
        return tuple(sorted({name for entry in self.mixture for name in entry.only}))

    @property
    def sources(self) -> "tuple[DataConfig, ...]":
        """One config per source, in the order of the mixture. Without a mixture, this config alone."""
        fields = SourceConfig.model_fields
        changes = [{key: getattr(entry, key) for key in fields} | {"mixture": ()} for entry in self.mixture]
        return tuple(self.model_copy(update=change) for change in changes) or (self,)


class ShardsConfig(Section):
    """How an island reads text shard by shard (`data.order: shards`, `data.source: shards`)."""

    cache_gb: float | None = Field(default=None, gt=0)
    """Limit of all shards in island.cache_dir, in GB; those that were not read for the longest time make room. null:
    none."""
    ahead: int = Field(default=2, ge=1, le=1000)
    """Shards that are fetched or tokenised before training comes to them."""
    processes: int = Field(default=1, ge=1, le=1024)
    """Processes that tokenise during training; they do not change the result."""
    store_seconds: float = Field(default=240.0, gt=0)
    """For how long the store of `data.source: shards` may be silent before the island ends. It waits as long."""


class EvaluateConfig(Section):
    """Held-out loss on the global params."""

    every_rounds: int = Field(default=1, ge=1)
    """Averagings of every parameter between evaluations."""
    tokens: int = Field(default=65536, ge=1)
    """Held-out tokens of an evaluation, if there are as many."""
