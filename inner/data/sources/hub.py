"""Quickly check that the Hugging Face hub has a repository, before a download begins."""

from typing import Literal

from inner.errors import InputError, summarise

HUB_TIMEOUT_SECONDS = 10.0


def require_on_hub(kind: Literal["dataset", "model"], name: str, cure: str) -> str | None:
    """Return the newest commit of `name` on the hub; None in offline mode. Raises InputError if it
    is missing or unreachable.

    The hub's own loading code would retry for half a minute without a network. This function tries
    once.
    """
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return None
    api = huggingface_hub.HfApi()
    fetch_info = api.dataset_info if kind == "dataset" else api.model_info
    try:
        return fetch_info(name, timeout=HUB_TIMEOUT_SECONDS).sha
    except Exception as error:
        # Catch all exceptions: the hub's HTTP library, and with it their type, changes between
        # versions.
        raise InputError(
            f"{kind} {name!r} cannot be reached on the Hugging Face hub: {summarise(error)}; {cure}"
        ) from error
