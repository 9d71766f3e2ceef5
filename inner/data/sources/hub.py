"""One short question to the Hugging Face hub before anything waits for it."""

from typing import Literal

from inner.errors import InputError

HUB_TIMEOUT_SECONDS = 10.0


def require_on_hub(kind: Literal["dataset", "model"], name: str, cure: str) -> None:
    """Return if the hub has `name`, or if it is set to work offline; InputError: it has not, or cannot be reached.

    The hub's own loading code retries for half a minute without a network; this asks once.
    """
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return
    api = huggingface_hub.HfApi()
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        ask(name, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:
        # Which HTTP library the hub uses, and so what it raises, changes with its version.
        raise InputError(
            f"{kind} {name!r} cannot be reached on the Hugging Face hub: {one_line(error)}; {cure}"
        ) from error


def one_line(error: Exception) -> str:
    """The error's type and the first line of its text, cut to a readable length."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
