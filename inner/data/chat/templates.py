"""Templates: the markers around the messages of a conversation, and the parts that the model has to
learn to write.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from inner.data.chat.messages import ASSISTANT, Message


class Piece(NamedTuple):
    """A piece of a templated conversation. A marker is a single token if the tokenizer has a
    special token of its name.
    """

    text: str
    is_learned: bool
    is_marker: bool = False


def chatml(messages: Sequence[Message]) -> Iterator[Piece]:
    """Yield messages as <|im_start|>role, line break, content, <|im_end|>, line break. Qwen and
    other models use this form.
    """
    for role, content in messages:
        learns = role == ASSISTANT
        yield Piece("<|im_start|>", False, is_marker=True)
        yield Piece(f"{role}\n", False)
        yield Piece(content, learns)
        yield Piece("<|im_end|>", learns, is_marker=True)
        yield Piece("\n", False)


def llama3(messages: Sequence[Message]) -> Iterator[Piece]:
    """Yield messages with the headers of Llama 3."""
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
"""The marker that each template puts at the end of a message. The model learns to end its messages
with it."""
TEMPLATES: dict[str, Callable[[Sequence[Message]], Iterator[Piece]]] = {"chatml": chatml, "llama3": llama3}
