"""Decide which keys of a config a swarm may set on a joining island, and read its text. Does not
import torch.

The swarm's text is from a stranger. It may set the run's part of a config and never the island's
part. In the run's part it may only set values. A key that names a file or folder must be set by the
island's operator, or the island does not join.
"""

import re
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from diloco.config.errors import explain_errors
from diloco.config.own_code import check_allowed, named_sources, own_code
from diloco.config.schema import IslandConfig, RunConfig, dump_config
from diloco.errors import ConfigError
from inner.config import DataConfig
from inner.data.sources.hub_dataset import READERS_OF_FILES
from inner.foreign.text import parse_yaml
from inner.import_path import is_import_path

Origin = Literal["swarm", "island", "hub", "code"]
"""How a key of the run's part is taken from the swarm.

swarm: the value is taken. island: the value names places on a machine; the swarm's value is kept
for the run's hash and never opened. hub: the name of something on the Hugging Face hub is taken,
the name of a file or folder is not. code: the name of a component of this project is taken; an
import path only if the island's operator has allowed it."""

ISLAND_SECTIONS = ("island", "islands")
"""Sections whose keys all belong to the island. A swarm's text with one of them is refused."""
NOT_FROM_SWARM: dict[str, Origin] = {
    "model.init_from": "island",
    "model.name": "code",
    "optimizer.name": "code",
    "outer.codec": "code",
    "outer.merge.rule": "code",
    "outer.optimizer.rule": "code",
    "data.source": "code",
    "data.paths": "island",
    "data.dataset": "hub",
    "data.tokenizer": "hub",
    "data.mixture.source": "code",
    "data.mixture.paths": "island",
    "data.mixture.dataset": "hub",
}
FROM_SWARM = {
    "": "name seed order_seed params param_names code_sha256",
    "model": "options init_sha256 preset dim num_layers num_heads num_kv_heads head_dim ffn_dim "
    "vocab_size rope_theta "
    "norm_eps qk_norm qkv_bias tie_embeddings model_type",
    "model.decoder": "norm norm_place parallel activation gated out_bias ffn_bias positions "
    "max_positions rotary_dim "
    "no_rope_every query_dim score_cap logit_cap embed_scale logit_scale",
    "model.decoder.window": "size full_every first_layer rope_theta",
    "model.rope_scaling": "rope_type factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor "
    "attention_factor beta_fast beta_slow mscale mscale_all_dim",
    "model.experts": "number per_token dim shared dense_layers scores groups kept_groups "
    "renormalise scale capacity",
    "model.latent": "q_rank kv_rank nope_dim rope_dim value_dim",
    "model.predict": "depths weight",
    "data": "options dataset_config split text_field format chat_template max_tokens seq_len eos "
    "bos order "
    "shard_tokens document_mask heldout_fraction",
    "data.mixture": "options dataset_config split text_field format chat_template max_tokens name "
    "weight only",
    "optimizer": "options lr betas eps momentum_weight muon_momentum muon_row_beta weight_decay "
    "clip_norm schedule "
    "warmup_steps decay_steps min_lr_ratio tokens_per_step max_skipped_steps z_loss dropout "
    "state_dtype "
    "noise_scale_every",
    "optimizer.spikes": "deviations steps action",
    "optimizer.balance": "bias_speed sequence_loss router_z_loss",
    "optimizer.groups": "pattern lr_scale weight_decay optimizer",
    "optimizer.averaging": "x y",
    "outer": "rounds inner_steps fragments fragment_pattern delay mix eager moments local_steps "
    "round_seconds "
    "transport part_elements quorum wait_for below_quorum missed_progress start_islands "
    "wait_seconds audit",
    "outer.optimizer": "options lr momentum nesterov delayed",
    "outer.optimizer.align": "keep turn shrink most doubt",
    "outer.merge": "options experts trim max_norm_ratio max_norm_zscore min_cosine "
    "refuse_norm_ratio",
    "outer.experts": "every codec group",
    "outer.gossip": "group momentum lr pull params",
    "outer.coding": "options feedback rounding top_k chunk_elements value_bits rank",
    "evaluate": "every_rounds tokens",
    "stages": "tokens seq_len tokens_per_step lr weights",
}
"""The other keys of the run's part, by section. A test checks that each key of the schema is in one
of the tables."""
MAX_TEXT_CHARS = 1 << 16
"""Longest config text of a swarm, in characters. A config with all of its keys has about 8,000."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


def swarm_text(run: RunConfig) -> str:
    """Return the text that an island publishes for joiners: only the run's part, even if `run` is a
    whole Config.
    """
    return dump_config(RunConfig(**{key: getattr(run, key) for key in RunConfig.model_fields}))


def parse_swarm_config(text: str) -> RunConfig:
    """Parse the config text that a swarm has sent. Raises ConfigError, also if the text sets
    anything of an island.
    """
    values = _load_plain_yaml(text)
    if not isinstance(values, dict):
        raise ConfigError(
            f"the swarm's config: got a {type(values).__name__}, expected: sections with keys"
        )
    if found := [name for name in ISLAND_SECTIONS if name in values]:
        raise ConfigError(
            f"the swarm's config sets {' and '.join(found)}, which only the operator of an island "
            "sets (addresses, folders, mirrors, keys). No island publishes such settings, so do "
            "not trust the source of this text"
        )
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = explain_errors(error, RunConfig, "")
        raise ConfigError("\n  ".join(["the swarm's config:", *map(_printable, lines)])) from None


def check_places(run: RunConfig, island: IslandConfig) -> None:
    """Raise ConfigError, with the cure, if the joining island would import code or open a file that
    the swarm names.
    """
    check_allowed(own_code(run), island.allow_imports, "add to island.allow_imports: ")
    for name, source in named_sources(run.data.of_island(island.label)):
        own = island.data_paths
        cure = "island.data_paths=[PATH]"
        if name is not None:
            own = island.mixture_paths.get(name)
            cure = f"island.mixture_paths={{{name}: [PATH]}}"
        if own is None and (places := _places_of(source)):
            key = "data.dataset" if source.source == "huggingface" else "data.paths"
            raise _place_error(key, ", ".join(places), cure)
    tokenizer = run.data.tokenizer
    if island.tokenizer is None and tokenizer != "bytes" and _names_a_file(tokenizer):
        raise _place_error("data.tokenizer", tokenizer, "island.tokenizer=PATH")


def own_the_places(run: RunConfig, island: IslandConfig) -> IslandConfig:
    """Return the island with the run's places and code as its own.

    It is for a launcher whose operator wrote the run's config.
    """
    data = run.data.of_island(island.label)
    needed = {name: paths for name, s in named_sources(data) if (paths := _places_of(s))}
    change = {
        "data_paths": island.data_paths or needed.get(None),
        "mixture_paths": {name: paths for name, paths in needed.items() if name is not None}
        | island.mixture_paths,
        "tokenizer": island.tokenizer
        or (run.data.tokenizer if _names_a_file(run.data.tokenizer) else None),
        "allow_imports": island.allow_imports or tuple(path for _, path in own_code(run)),
    }
    return island.model_copy(update=change)


def describe_data(run: RunConfig) -> str:
    """Return one line about the run's data for a joining island's operator: what is fetched, and
    how much of it.
    """
    sources = ", ".join(map(_describe_source, run.data.sources))
    return _printable(f"it reads {sources} with the tokenizer {run.data.tokenizer}")


def _describe_source(source: DataConfig) -> str:
    name = source.dataset or source.source if source.source == "huggingface" else source.source
    return name if source.max_tokens is None else f"{name} (at most {source.max_tokens:,} tokens)"


def _places_of(source: DataConfig) -> tuple[str, ...]:
    """Return the places on a machine from which a source is read; empty if it needs none."""
    if source.source in ("files", "tokens", "shards") or is_import_path(source.source):
        return tuple(source.paths)
    if (
        source.source == "huggingface"
        and source.dataset is not None
        and _names_a_file(source.dataset)
    ):
        return (source.dataset,)
    return ()


def _names_a_file(name: str) -> bool:
    """Return whether a name may refer to a file or folder, or to code that reads them. A hub name
    is [OWNER/]NAME.
    """
    is_hub_name = (
        not name.endswith((".json", ".py"))
        and _HUB_NAME.fullmatch(name) is not None
        and ".." not in name
    )
    return not is_hub_name or name in READERS_OF_FILES or Path(name).exists()


def _place_error(key: str, value: str, cure: str) -> ConfigError:
    return ConfigError(
        f"{key}: the run reads {_printable(value)!r}. A swarm does not say which files of this "
        f"machine are read: give the place where this island has the same text or tokenizer, {cure}"
    )


def _load_plain_yaml(text: str) -> object:
    try:
        return parse_yaml(text, anchors=False, most_chars=MAX_TEXT_CHARS)
    except ValueError as error:
        raise ConfigError(
            f"the swarm's config is not valid YAML: {_printable(str(error))[:300]}"
        ) from None


def _printable(text: str) -> str:
    """Return the text without control characters, because it is shown in a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text[:1000])
