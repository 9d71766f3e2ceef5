"""The messages of a conversation in the forms of common datasets: role and content, or ShareGPT's
from and value.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inner.errors import InputError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
"""Names of roles in datasets, and the names for them here."""
KEYS = (("role", "content"), ("from", "value"))
ASSISTANT = "assistant"


class Message(NamedTuple):
    """One message. Roles are system, user and assistant."""

    role: str
    content: str


def parse_messages(value: object, where: str) -> list[Message]:
    """Return the messages in a field of a row; none if the field is null. Raises InputError for any
    other value.
    """
    if value is None:
        return []
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(
            f"{where}: got {type(value).__name__}, need a list of messages; set data.text_field to "
            "their field"
        )
    return [
        _parse_message(message, f"{where}, message {number}")
        for number, message in enumerate(value)
    ]


def to_text(messages: Sequence[Message]) -> str:
    """Return the messages as the text of a document, or "" if no message is from an assistant."""
    if not any(message.role == ASSISTANT and message.content for message in messages):
        return ""
    return json.dumps(messages, ensure_ascii=False)


def from_text(text: str) -> list[Message]:
    """Return the messages of a text that `to_text` returned."""
    return [Message(*message) for message in json.loads(text)]


def learned_text(text: str) -> str:
    """Return the assistant's words in the messages of a text that `to_text` returned."""
    return "".join(message.content for message in from_text(text) if message.role == ASSISTANT)


def _parse_message(message: object, where: str) -> Message:
    for role_key, content_key in KEYS:
        if isinstance(message, Mapping) and role_key in message and content_key in message:
            role = message[role_key]
            content = message[content_key]
            if role not in ROLES or not isinstance(content, str):
                raise InputError(
                    f"{where}: got {role_key}={role!r} and {content_key} of "
                    f"{type(content).__name__}; allowed: text of "
                    f"{', '.join(ROLES)}"
                )
            return Message(ROLES[role], content)
    got = sorted(message) if isinstance(message, Mapping) else type(message).__name__
    raise InputError(f"{where}: got {got}, need `role` and `content`, or `from` and `value`")
