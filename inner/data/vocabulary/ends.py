"""Choose the token that ends a document: by the user's setting, by tokenizer_config.json, or by its
name.
"""

import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from inner.data.sources.hub import require_on_hub
from inner.errors import InputError, summarise

log = logging.getLogger(__name__)

EOS_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
TOKENIZER_CONFIG = "tokenizer_config.json"
SHOWN = 8
MOST_BYTES = 1 << 26


def choose_eos(
    ids: Mapping[str, int], config: Mapping[str, object], eos: str | None, name: str
) -> tuple[str, str]:
    """Return the token that ends a document, and where that choice comes from. Raises InputError if
    there is no such token.
    """
    told = token_name(config, "eos_token")
    source = "data.eos" if eos is not None else TOKENIZER_CONFIG
    if (given := eos if eos is not None else told) is not None:
        known_id(ids, given, source, name)
        return given, source
    for each in EOS_NAMES:
        if each in ids:
            return each, "by its name"
    raise InputError(
        f"data.tokenizer {name!r} has no end-of-text token; needs one of {', '.join(EOS_NAMES)}, "
        "or eos_token in a "
        f"{TOKENIZER_CONFIG} beside it; name one of its tokens by data.eos{_special_names(ids)}"
    )


def known_id(ids: Mapping[str, int], token: str, source: str, name: str) -> int:
    """Return the id of a token. Raises InputError, which names the `source` of the choice, if the
    tokenizer does not have it.
    """
    if token not in ids:
        raise InputError(
            f"{source} names {token!r}, which is not a token of data.tokenizer {name!r}; name one "
            "of its tokens by "
            f"{'data.bos' if source == 'data.bos' else 'data.eos'}{_special_names(ids)}"
        )
    return ids[token]


def token_name(config: Mapping[str, object], key: str) -> str | None:
    """Return the name of a token in a tokenizer_config.json, where it is a text, or an object with
    `content`.
    """
    value = config.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def read_beside(folder: Path) -> dict[str, object]:
    """Read the tokenizer_config.json in a folder; empty if there is none. Raises InputError if it
    is damaged.
    """
    path = folder / TOKENIZER_CONFIG
    if not path.is_file():
        return {}
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ValueError(f"it has {size} bytes")
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({summarise(error)}); copy it again") from None
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: got a JSON {type(values).__name__}, need an object; copy it again"
        )
    return values


@cache
def read_from_hub(name: str) -> dict[str, object]:
    """Read the tokenizer_config.json of a tokenizer on the hub, from the cache if possible. Empty
    if it has none or cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    cached = huggingface_hub.try_to_load_from_cache(name, TOKENIZER_CONFIG)
    if cached is None:
        try:
            require_on_hub("model", name, "check the network")
            cached = huggingface_hub.hf_hub_download(name, TOKENIZER_CONFIG)
        except Exception as error:  # noqa: BLE001 - the hub's HTTP library has errors of its own
            if isinstance(error, EntryNotFoundError) and not isinstance(
                error, LocalEntryNotFoundError
            ):
                return {}  # The hub has answered that it has no such file.
            log.warning(
                "data.tokenizer %s: its %s cannot be read (%s), so eos is chosen by its name; to "
                "be sure, set data.eos",
                name, TOKENIZER_CONFIG, summarise(error),
            )  # fmt: skip
    return read_beside(Path(cached).parent) if isinstance(cached, str) else {}


def _special_names(ids: Mapping[str, int]) -> str:
    """Return a text with some tokens that look like special tokens, to be put at the end of a
    sentence.
    """
    names = sorted(
        token for token in ids if len(token) > 2 and token[0] in "<[" and token[-1] in ">]"
    )
    return f", such as {', '.join(names[:SHOWN])}" if names else ""
