"""Templates: the markers around the messages of a conversation, and the parts that the model has to
learn to write.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from inner.data.chat.messages import ASSISTANT, Message


class TemplatePiece(NamedTuple):
    """A piece of a templated conversation. A marker is a single token if the tokenizer has a
    special token of its name.
    """

    text: str
    is_learned: bool
    is_marker: bool = False


def chatml(messages: Sequence[Message]) -> Iterator[TemplatePiece]:
    """Yield messages as <|im_start|>role, line break, content, <|im_end|>, line break. Qwen and
    other models use this form.
    """
    for role, content in messages:
        learns = role == ASSISTANT
        yield TemplatePiece("<|im_start|>", False, is_marker=True)
        yield TemplatePiece(f"{role}\n", False)
        yield TemplatePiece(content, learns)
        yield TemplatePiece("<|im_end|>", learns, is_marker=True)
        yield TemplatePiece("\n", False)


def llama3(messages: Sequence[Message]) -> Iterator[TemplatePiece]:
    """Yield messages with the headers of Llama 3."""
    yield TemplatePiece("<|begin_of_text|>", False, is_marker=True)
    for role, content in messages:
        learns = role == ASSISTANT
        yield TemplatePiece("<|start_header_id|>", False, is_marker=True)
        yield TemplatePiece(role, False)
        yield TemplatePiece("<|end_header_id|>", False, is_marker=True)
        yield TemplatePiece("\n\n", False)
        yield TemplatePiece(content.strip(), learns)
        yield TemplatePiece("<|eot_id|>", learns, is_marker=True)


END_MARKERS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}
"""The marker that each template puts at the end of a message. The model learns to end its messages
with it."""
TEMPLATES: dict[str, Callable[[Sequence[Message]], Iterator[TemplatePiece]]] = {
    "chatml": chatml,
    "llama3": llama3,
}
