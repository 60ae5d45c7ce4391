"""Turns conversations into token ids and loss masks, through a model's chat template.

The control side counts tokens with this module (`tokens.py`) and the worker trains and samples
with it (`engine/worker/rollouts/renderer.py`), so both see the same tokens.

The text is split where the model starts and stops writing, and each part is tokenised by itself.
So the prompt of a training row has exactly the ids of the prompt that the sampler gets. A template
that rewrites history (the longer conversation does not begin with the prompt) is refused for
training rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.core.errors import UserError
from envs.json_types import ChatMessage, ToolSchema

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateError(ValueError):
    """A chat template refused a conversation, or rewrites its beginning."""


class RewrittenHistory(TemplateError):
    """A template changes the text of earlier messages when more messages follow.

    Attributes:
        index: position of the message whose turn does not continue its own prompt.
    """

    def __init__(self, index: int) -> None:
        super().__init__(
            f"the chat template does not continue its own prompt at message {index + 1}"
        )
        self.index = index


@dataclass(frozen=True)
class TokenizedChat:
    """A conversation as tokens.

    Attributes:
        ids: the token ids.
        turns: (start, end) of each assistant turn in `ids`. The end-of-turn token belongs to the
            turn; the opening that the generation prompt contains does not.
    """

    ids: list[int]
    turns: list[tuple[int, int]]

    def mask(self, loss_on: str = "assistant") -> list[int]:
        """One number per token: 1 if it carries loss, else 0.

        Args:
            loss_on: "assistant" (all assistant turns), "last" (the last one) or "all" (every token
                but the first, which nothing predicts).
        """
        if loss_on == "all":
            return [0, *[1] * (len(self.ids) - 1)] if self.ids else []
        mask = [0] * len(self.ids)
        turns = self.turns[-1:] if loss_on == "last" else self.turns
        for start, end in turns:
            mask[start:end] = [1] * (end - start)
        return mask


@dataclass(frozen=True)
class ChatFormat:
    """How one model writes a conversation.

    Attributes:
        template: the source of its chat template.
        special_tokens: variables for the template, such as `eos_token`.
        encode: gives the token ids of a text; it must not add special tokens.
        stop_texts: texts of the tokens that end a turn.
        thinking: whether the template is asked to open a think block.
        tool_template: the template for conversations with tools; "" if `template` serves both.
    """

    template: str
    special_tokens: Mapping[str, str]
    encode: Callable[[str], list[int]]
    stop_texts: Sequence[str]
    thinking: bool = False
    tool_template: str = ""

    def text(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = (), *, prompt: bool
    ) -> str:
        """The conversation as the template writes it.

        Args:
            prompt: whether the text ends with the opening of an assistant turn, so that the model
                goes on from there.

        Raises TemplateError with the template's own message if it refuses the conversation, and
        UserError MODEL_UNSUPPORTED if the template does not compile.
        """
        # jinja2 takes 40 ms to import, which a start of the server does not need.
        from engine.models import chat_template  # noqa: PLC0415

        variables = {
            **self.special_tokens,
            "messages": [_for_template(message) for message in messages],
            "tools": list(tools) or None,  # templates test for None
            "documents": None,
            "add_generation_prompt": prompt,
            "enable_thinking": self.thinking,
        }
        source = self.tool_template if tools and self.tool_template else self.template
        try:
            return chat_template.render(source, variables)
        except UserError:  # the template does not compile
            raise
        except Exception as error:  # a template is code from a model repository
            raise TemplateError(f"the chat template refused the messages: {error}") from error

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> list[int]:
        """Token ids of the conversation, up to and including the opening of the assistant's turn.

        Raises as `text` does.
        """
        return self.encode(self.text(messages, tools, prompt=True))

    def between_turns(
        self,
        before: Sequence[ChatMessage],
        replies: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
    ) -> list[int]:
        """Token ids of what stands between two assistant turns.

        They begin after the end token of the last turn in `before`, and end with the opening of the
        next turn.

        Args:
            before: the conversation so far; its last message is the assistant's.
            replies: the messages that answer it.

        Raises RewrittenHistory if the template changes the text of `before` once `replies` follow,
        else as `text` does.
        """
        text_before = self.text(before, tools, prompt=False)
        next_prompt = self.text([*before, *replies], tools, prompt=True)
        if not next_prompt.startswith(text_before):
            raise RewrittenHistory(len(before) - 1)
        return self.encode(next_prompt[self._end_of_turn(text_before) :])

    def conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> TokenizedChat:
        """A finished conversation as tokens, up to the end of its last assistant turn.

        The text is encoded in parts, split where a turn of the assistant begins and ends, so that
        every prompt has the ids that the sampler gets. Raises RewrittenHistory if a turn does not
        continue the text of its own prompt, else as `text` does.
        """
        ids: list[int] = []
        turns: list[tuple[int, int]] = []
        encoded_text = ""  # the text that `ids` stands for
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # The text up to the opening of this turn, and the text with the whole, closed turn.
            prompt = self.text(messages[:index], tools, prompt=True)
            closed = self.text(messages[: index + 1], tools, prompt=False)
            if not (prompt.startswith(encoded_text) and closed.startswith(prompt)):
                raise RewrittenHistory(index)
            end = self._end_of_turn(closed)
            ids += self.encode(prompt[len(encoded_text) :])
            start = len(ids)
            ids += self.encode(closed[len(prompt) : end])
            turns.append((start, len(ids)))
            encoded_text = closed[:end]
        return TokenizedChat(ids, turns)

    def _end_of_turn(self, closed: str) -> int:
        """The position after the end token of the last turn in the text `closed`.

        Templates may write a newline after that token, which does not belong to the turn. In a text
        without an end token the turn ends with the text.
        """
        ends = [closed.rfind(stop) + len(stop) for stop in self.stop_texts if stop in closed]
        return max(ends) if ends else len(closed)


def _for_template(message: ChatMessage) -> ChatMessage:
    """A copy of `message` in the form that transformers passes to a template.

    Keys with the value None are left out, because templates test whether a key is there. Reasoning
    is given as "thinking" and as "reasoning_content", the two names that templates look for.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
