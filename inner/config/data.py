"""Config of the text: which text is trained on, and which part of it is held out."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from inner.config.section import Section
from inner.errors import nearest_multiples
from inner.import_path import Options, is_import_path, one_of

SOURCES = ("python-stdlib", "files", "tokens", "shards", "huggingface")


class SourceConfig(Section):
    """One source of text."""

    source: Annotated[str, one_of(SOURCES, "my_package.sources:Papers")] = "python-stdlib"
    """Where the text comes from: `python-stdlib` (Python's own source text, for tests), `files`,
    `tokens`, `shards` (text that `diloco prepare --into` has written), `huggingface`, or an own
    source by its import path, see inner/data/sources/own_source.py."""
    options: Options = Field(default_factory=dict)
    """Arguments of an own source."""
    paths: list[str] = Field(default_factory=list)
    """For `files`: text, .jsonl, .parquet or .tar files, folders, or glob patterns. For `tokens`:
    token files of Megatron, datatrove or OLMo. For `shards`: one folder or URL that fsspec supports
    (s3://bucket/text). An own source gets the paths unchanged."""
    dataset: str | None = None
    """For `huggingface`: the name of the dataset, for example `allenai/c4`."""
    dataset_config: str | None = None
    """For `huggingface`: the configuration of the dataset, for example `en`. null: the dataset has
    only one."""
    split: str = "train"
    """For `huggingface`: the split that is read."""
    text_field: str = "text"
    """Name of the field of a row that holds the text or the messages of a conversation."""
    format: Literal["text", "chat"] = "text"
    """Content of a row of a .jsonl, .parquet or .tar file or of a dataset. `text`: plain text.
    `chat`: a conversation, in the field `messages` unless `text_field` names another; the loss
    counts only the assistant's words."""
    chat_template: Literal["chatml", "llama3"] = "chatml"
    """The template that puts role markers around the messages of a conversation."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Largest number of training tokens that are read. null: all of the text."""

    @model_validator(mode="after")
    def _settings_fit_the_source(self) -> Self:
        if self.options and not is_import_path(self.source):
            raise ValueError(
                f"options are for an own source only, and source is {self.source}; leave options "
                "out"
            )
        if self.source == "shards" and self.max_tokens is not None:
            raise ValueError(
                "max_tokens applies when text is prepared, and shards are already prepared; leave "
                "it out here"
            )
        if self.format == "chat" and self.source not in ("files", "huggingface"):
            raise ValueError(
                "format chat needs the rows of source files or huggingface, and source is "
                f"{self.source}"
            )
        return self


class MixtureEntry(SourceConfig):
    """One source of a mixture."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the source in the metrics."""
    weight: float = Field(gt=0, allow_inf_nan=False)
    """Relative share of the sequences that are read; the weights need not sum to 1."""
    only: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")], ...] = ()
    """Names of the islands that read this source; no other island needs to have it. Empty: all
    islands read it."""

    def is_read_by(self, island: str) -> bool:
        """Return whether the island of this name may read the source."""
        return not self.only or island in self.only


class DataConfig(SourceConfig):
    """The sources of text, and how the text is cut into sequences."""

    mixture: tuple[MixtureEntry, ...] = ()
    """Several sources, mixed by weight. Empty: the single source given by `source` and the keys
    next to it.
    """
    tokenizer: str = "bytes"
    """How text becomes tokens: `bytes`, the path of a tokenizer.json, or the name of a tokenizer on
    the Hugging Face hub."""
    eos: str | None = None
    """Name of the token that ends a document. null: the eos_token of the tokenizer_config.json
    beside the tokenizer.json; without such a file, the first of </s>, <|endoftext|>,
    <|end_of_text|>, <eos> that the tokenizer has."""
    bos: str | None = None
    """Name of a token that is put before each document. null: none."""
    seq_len: int = Field(default=256, ge=8)
    """Number of tokens in a sequence."""
    order: Literal["global", "shards"] = "global"
    """`global` tokenises the whole text first and shuffles all its sequences. `shards` keeps the
    shards in the order of the text and shuffles within each, so that training on the first shard
    begins while later shards are still being tokenised."""
    shard_tokens: int = Field(default=1 << 22, ge=64)
    """Number of tokens in a shard if `order` is shards; a multiple of seq_len."""
    document_mask: bool = False
    """Whether attention stays within its document when a sequence holds several documents."""
    heldout_fraction: float = Field(default=0.02, gt=0, lt=1)
    """Share of the text that is never trained on, and on which the loss is evaluated."""

    @model_validator(mode="after")
    def _a_mixture_names_each_source_once(self) -> "DataConfig":
        names = [entry.name for entry in self.mixture]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(
                f"mixture has {twice[0]!r} {names.count(twice[0])} times; give each entry its own "
                "name"
            )
        plain = SourceConfig()
        also = [
            key for key in SourceConfig.model_fields if getattr(self, key) != getattr(plain, key)
        ]
        if self.mixture and also:
            raise ValueError(
                f"mixture has sources of its own: move {', '.join(also)} into its entries"
            )
        return self

    @model_validator(mode="after")
    def _sequences_fill_shards(self) -> "DataConfig":
        if self.order == "shards" and self.shard_tokens % self.seq_len:
            raise ValueError(
                f"shard_tokens: got {self.shard_tokens}, which is not a multiple of seq_len "
                f"{self.seq_len}; allowed: "
                f"multiples of it, such as {nearest_multiples(self.shard_tokens, self.seq_len)}"
            )
        return self

    @model_validator(mode="after")
    def _own_sources_stay_on_their_islands(self) -> "DataConfig":
        for entry in self.mixture:
            if entry.only and (self.order == "shards" or entry.source == "shards"):
                raise ValueError(
                    f"mixture: {entry.name!r} has `only`, but all islands can read shards from a "
                    "store; leave `only` out, or set order to global and another source"
                )
        return self

    def of_island(self, island: str) -> "DataConfig":
        """Return the data that the island of this name reads. Raises ValueError if no source is
        left for it.
        """
        here = tuple(entry for entry in self.mixture if entry.is_read_by(island))
        if self.mixture and not here:
            raise ValueError(
                f"data.mixture: island {island!r} has no source, because `only` of each names "
                "other islands; add it to one, or add a source that all islands read"
            )
        return self.model_copy(update={"mixture": here})

    @property
    def tokenizer_choice(self) -> tuple[str, str | None, str | None]:
        """The tokenizer and the names of its eos and bos, as arguments of `build_tokenizer`."""
        return self.tokenizer, self.eos, self.bos

    @property
    def owners(self) -> tuple[str, ...]:
        """The islands that have a source of their own, which not all islands read."""
        return tuple(sorted({name for entry in self.mixture for name in entry.only}))

    @property
    def sources(self) -> "tuple[DataConfig, ...]":
        """One config per source, in the order of the mixture. Without a mixture, this config
        alone.
        """
        fields = SourceConfig.model_fields
        changes = [
            {key: getattr(entry, key) for key in fields} | {"mixture": ()} for entry in self.mixture
        ]
        return tuple(self.model_copy(update=change) for change in changes) or (self,)


class ShardsConfig(Section):
    """How an island reads text shard by shard (`data.order: shards`, `data.source: shards`)."""

    cache_gb: float | None = Field(default=None, gt=0)
    """Limit of all shards in island.cache_dir, in GB. When it is reached, the shards that were read
    least recently are deleted. null: no limit."""
    ahead: int = Field(default=2, ge=1, le=1000)
    """Number of shards that are fetched or tokenised ahead of training."""
    processes: int = Field(default=1, ge=1, le=1024)
    """Number of processes that tokenise during training. It does not change the result."""
    store_seconds: float = Field(default=240.0, gt=0)
    """Seconds without an answer from the store of `data.source: shards` after which the island
    ends. Until then it waits and tries again."""


class EvaluateConfig(Section):
    """Evaluation of the held-out loss on the global params."""

    every_rounds: int = Field(default=1, ge=1)
    """Number of averagings of every parameter between two evaluations."""
    tokens: int = Field(default=65536, ge=1)
    """Number of held-out tokens in an evaluation, or all held-out tokens if there are fewer."""
