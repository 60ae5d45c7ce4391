"""Conversations to token ids and loss masks, through a model's chat template.

The one implementation of both: the control side counts with it (`tokens.py`) and the worker trains
and samples with it (`engine/worker/rollouts/renderer.py`), so what is counted is what is trained.

Text is cut where the model starts and stops writing, and each piece is tokenised by itself: then
the prompt of a training row is, id for id, the prompt the sampler was given. A template that
rewrites history (so that a prompt is no prefix of what follows it) is refused for training rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.core.errors import UserError
from envs.json_types import ChatMessage, ToolSchema

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateError(ValueError):
    """A chat template refused a conversation, or does not keep the prompt as its beginning."""


class RewrittenHistory(TemplateError):
    """A template changes what it wrote before once more follows.

    Attributes:
        index: of the message whose turn does not continue its own prompt.
    """

    def __init__(self, index: int) -> None:
        super().__init__(
            f"the chat template does not continue its own prompt at message {index + 1}"
        )
        self.index = index


@dataclass(frozen=True)
class TokenizedChat:
    """A conversation as tokens. `turns`: (start, end) of each assistant turn among `ids`, its
    end-of-turn token included and what the generation prompt already holds left out."""

    ids: list[int]
    turns: list[tuple[int, int]]

    def mask(self, loss_on: str = "assistant") -> list[int]:
        """1 on tokens that carry loss: all assistant turns, the last one, or every token but the
        first, which nothing predicts."""
        if loss_on == "all":
            return [0, *[1] * (len(self.ids) - 1)] if self.ids else []
        mask = [0] * len(self.ids)
        for start, end in self.turns[-1:] if loss_on == "last" else self.turns:
            mask[start:end] = [1] * (end - start)
        return mask


@dataclass(frozen=True)
class ChatFormat:
    """How one model writes a conversation.

    Attributes:
        template: the source of its chat template.
        special_tokens: variables of the template, `eos_token` and the like.
        encode: ids of template text; it must add no special tokens of its own.
        stop_texts: texts of the tokens that end a turn.
        thinking: whether the template is asked to open a think block.
        tool_template: used instead where there are tools; "" where one template serves both.
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
        """The conversation as the template writes it; `prompt` opens the next assistant turn.

        Raises TemplateError with the template's own words when it refuses the messages, and
        UserError MODEL_UNSUPPORTED when it does not compile.
        """
        # jinja2 takes 40 ms to import, which a start of the server does not need.
        from engine.models import chat_template  # noqa: PLC0415

        variables = {
            **self.special_tokens,
            "messages": [_as_templates_read_it(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": prompt,
            "enable_thinking": self.thinking,
        }
        source = (self.tool_template if tools else "") or self.template
        try:
            return chat_template.render(source, variables)
        except UserError:
            raise
        except Exception as error:  # a template is code from a model repository
            raise TemplateError(f"the chat template refused the messages: {error}") from error

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> list[int]:
        """Token ids up to and including the opening of the assistant's turn."""
        return self.encode(self.text(messages, tools, prompt=True))

    def between_turns(
        self,
        before: Sequence[ChatMessage],
        replies: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
    ) -> list[int]:
        """Token ids between an assistant turn's end token and the opening of the next one.

        Args:
            before: the conversation so far, which ends with the assistant.
            replies: what was answered to it.

        Raises RewrittenHistory when the template changes what it wrote before.
        """
        closed = self.text(before, tools, prompt=False)
        opened = self.text([*before, *replies], tools, prompt=True)
        if not opened.startswith(closed):
            raise RewrittenHistory(len(before) - 1)
        return self.encode(opened[self._end_of_turn(closed) :])

    def conversation(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> TokenizedChat:
        """A finished conversation, up to the end of its last assistant turn.

        Raises RewrittenHistory when a turn is no continuation of its own prompt.
        """
        ids: list[int] = []
        turns: list[tuple[int, int]] = []
        done = ""  # the text whose ids are in `ids`
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.text(messages[:index], tools, prompt=True)
            whole = self.text(messages[: index + 1], tools, prompt=False)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise RewrittenHistory(index)
            end = self._end_of_turn(whole)
            ids += self.encode(prompt[len(done) :])
            start = len(ids)
            ids += self.encode(whole[len(prompt) : end])
            turns.append((start, len(ids)))
            done = whole[:end]
        return TokenizedChat(ids, turns)

    def _end_of_turn(self, closed: str) -> int:
        """Where the last turn's end token ends; templates write a newline or so after it."""
        ends = [closed.rfind(stop) + len(stop) for stop in self.stop_texts if stop in closed]
        return max(ends) if ends else len(closed)


def _as_templates_read_it(message: ChatMessage) -> ChatMessage:
    """`message` as transformers hands it to a template.

    Keys without a value are left out, since templates test for the key, and reasoning stands
    under each of the names that templates look for.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
