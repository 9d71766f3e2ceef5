"""Templates: what stands around the messages of a conversation, and which of it the model has to learn to write."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from inner.data.chat.messages import ASSISTANT, Message


class Piece(NamedTuple):
    """A stretch of a conversation. A marker is one token, if the tokenizer has a special token of this name."""

    text: str
    is_learned: bool
    is_marker: bool = False


def chatml(messages: Sequence[Message]) -> Iterator[Piece]:
    """<|im_start|>role, a line break, the content, <|im_end|>, a line break: Qwen, and many others."""
    for role, content in messages:
        learns = role == ASSISTANT
        yield Piece("<|im_start|>", False, is_marker=True)
        yield Piece(f"{role}\n", False)
        yield Piece(content, learns)
        yield Piece("<|im_end|>", learns, is_marker=True)
        yield Piece("\n", False)


def llama3(messages: Sequence[Message]) -> Iterator[Piece]:
    """The headers of Llama 3."""
    yield Piece("<|begin_of_text|>", False, is_marker=True)
    for role, content in messages:
        learns = role == ASSISTANT
        yield Piece("<|start_header_id|>", False, is_marker=True)
        yield Piece(role, False)
        yield Piece("<|end_header_id|>", False, is_marker=True)
        yield Piece("\n\n", False)
        yield Piece(content.strip(), learns)
        yield Piece("<|eot_id|>", learns, is_marker=True)


END_MARKERS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
"""The marker that each template puts at the end of a message, with which the model has learned to end its own."""
TEMPLATES: dict[str, Callable[[Sequence[Message]], Iterator[Piece]]] = {"chatml": chatml, "llama3": llama3}
