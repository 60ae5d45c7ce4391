"""The form that a conversation must have before a model is asked: roles, texts, sizes.

The tool `chat` and the server behind it check by the same rules
(engine/worker/serving/chat_request.py), so no model is loaded only to refuse its messages. Imports
nothing heavy.
"""

import json
from collections.abc import Sequence

from envs.json_types import ChatMessage, ToolSchema

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 1_000
MAX_TOOLS = 128
MAX_PROMPT_CHARS = 1_000_000  # characters are counted, because tokenising first would take long


class BadMessages(ValueError):
    """Messages or tools that no model can be asked with; the text says what is wrong.

    Attributes:
        field: "messages" or "tools".
        is_too_large: True if their form is right, but there are too many or they are too long.
    """

    def __init__(self, field: str, message: str, *, is_too_large: bool = False) -> None:
        """Refuse messages or tools.

        Args:
            field: what is wrong: "messages" or "tools".
            message: says what is wrong with it, as a sentence.
            is_too_large: True if the form is right, but there are too many or they are too long.
        """
        super().__init__(message)
        self.field = field
        self.is_too_large = is_too_large


def checked_messages(messages: object) -> list[ChatMessage]:
    """Return `messages` unchanged if they are a list of at least one message, each with a role in
    ROLES, and with text or nothing as content. Raises BadMessages otherwise."""
    if not isinstance(messages, list) or not messages:
        raise BadMessages("messages", "messages must be a list with at least one message.")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise BadMessages(
                "messages", "Each message needs a role: system, user, assistant or tool."
            )
        if not isinstance(message.get("content") or "", str):
            raise BadMessages("messages", "content must be text.")
    return messages


def checked_tools(tools: object) -> list[ToolSchema]:
    """Return `tools` unchanged if they are a list of objects. Raises BadMessages otherwise."""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadMessages("tools", "tools must be a list of objects.")
    return tools


def check_size(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> None:
    """Raise BadMessages if a prompt has too many messages, tools or characters. Call this before
    the prompt is rendered, which could take seconds for a large one."""
    if len(messages) > MAX_MESSAGES or len(tools) > MAX_TOOLS:
        raise BadMessages(
            "messages",
            f"At most {MAX_MESSAGES} messages and {MAX_TOOLS} tools.",
            is_too_large=True,
        )
    prompt_text = json.dumps([list(messages), list(tools)], ensure_ascii=False)
    if len(prompt_text) > MAX_PROMPT_CHARS:
        raise BadMessages(
            "messages",
            f"The prompt has more than {MAX_PROMPT_CHARS} characters.",
            is_too_large=True,
        )
