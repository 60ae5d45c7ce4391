"""Messages to token ids through the model's own chat template, and back.

`engine/models/chat_format.py` renders and masks; here its refusals become failures of the run.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from engine.models.chat_format import ChatFormat, NoReasoning, TemplateError
from engine.records.settings import Reasoning
from engine.worker.core.failures import WorkerFailure
from envs.json_types import ChatMessage, ToolSchema

TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
THINK_END = "</think>"


@dataclass(frozen=True)
class Rendered:
    """A conversation as token ids, with a mask of the same length: 1 where a token is trained, else
    0."""

    ids: list[int]
    loss_mask: list[int]


class Renderer:
    """A tokenizer, its chat template, and the tokens that end a turn."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], *, thinking: bool = False
    ) -> None:
        """Keep a tokenizer and the texts of its stop ids.

        Args:
            tokenizer: must have a chat template.
            stop_ids: every id that ends a turn; the first is the one that the template writes.
            thinking: whether the template is asked to open a think block.

        Raises:
            WorkerFailure: kind config, when the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise WorkerFailure(
                "config",
                "The model has no chat template.",
                hint="Use an instruct model, or add chat_template.jinja to the model folder.",
            )
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.thinking = thinking
        self._stop_texts = [str(tokenizer.decode([i])) for i in stop_ids]

    @property
    def _format(self) -> ChatFormat:
        """The chat template with the tokens it uses, as a `ChatFormat`, which renders and masks."""
        # A dict where the model has several templates, by name.
        template = self.tokenizer.chat_template
        return ChatFormat(
            template=self.tokenizer.get_chat_template(),
            tool_template=template.get("tool_use", "") if isinstance(template, dict) else "",
            special_tokens=self.tokenizer.special_tokens_map,
            encode=self.encode,
            stop_texts=self._stop_texts,
            thinking=self.thinking,
        )

    def text(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], *, prompt: bool
    ) -> str:
        """The conversation as the template writes it; with `prompt` it ends with the opening of the
        next assistant turn.

        Raises:
            TemplateError: when the template refuses the messages.
        """
        return self._format.text(messages, tools, prompt=prompt)

    def encode(self, text: str) -> list[int]:
        """The ids of text that the template wrote. Special tokens in the text are recognised, and
        none are added. [] for empty text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> list[int]:
        """Ids of the conversation up to and including the opening of the assistant's turn."""
        return self._format.prompt(messages, tools)

    def between_turns(
        self,
        before: Sequence[ChatMessage],
        replies: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        last_id: int | None = None,
    ) -> list[int]:
        """The ids to append after an assistant turn: what the template writes from its end to the
        opening of the next assistant turn, including `replies`.

        Args:
            before: the conversation so far; it ends with that assistant turn.
            replies: the environment's messages.
            tools: the same that the prompt was written with.
            last_id: the last id of that turn as it was sampled; None: its end token. A turn that
                did not end with such a token gets one.

        Raises:
            WorkerFailure: kind config, when the template refuses the replies.
        """
        try:
            return self._format.between_turns(before, replies, tools, last_id=last_id)
        except TemplateError as error:
            roles = ", ".join(str(reply.get("role")) for reply in replies)
            raise WorkerFailure(
                "config",
                f"The environment's reply cannot be written: {error}",
                evidence=f"roles of the reply: {roles}",
                hint="Let the environment reply with roles that this template takes, or take "
                "another model.",
            ) from error

    def rows(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        loss_on: str,
        reasoning: Reasoning = "keep",
    ) -> list[Rendered]:
        """A finished conversation as training rows with their loss masks: one, or several where the
        template writes earlier turns differently once more messages follow. Rows without a token
        to train are left out.

        Args:
            loss_on: `assistant` trains every assistant turn with its end token, `last` only the
                last of them, `all` every token but the first.
            reasoning: "keep" trains the reasoning that messages have, "drop" leaves it out, and
                "require" gives [] for a conversation with a turn that has none.

        Raises:
            WorkerFailure: kind data, when the template refuses the messages.
        """
        try:
            chats = self._format.rows(messages, tools, reasoning)
        except NoReasoning:
            return []
        except TemplateError as error:
            raise WorkerFailure(
                "data",
                f"A conversation cannot be written: {error}",
                hint="Leave out what the template does not take, or train another model.",
            ) from error
        rendered = [Rendered(chat.ids, chat.mask(loss_on)) for chat in chats]
        return [row for row in rendered if any(row.loss_mask)]

    def completion_text(self, ids: Sequence[int]) -> str:
        """The text of a completion's ids. If the last id ended the turn, it is left out; other
        special tokens stay in the text."""
        ids = list(ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    @property
    def opens_thought(self) -> bool:
        """Whether the prompt itself opens the think block, so that completions start inside it.
        Tried on a short prompt."""
        prompt = self.text([{"role": "user", "content": "?"}], (), prompt=True)
        return prompt.rstrip().endswith("<think>")

    def assistant_message(self, text: str, *, tools: bool) -> ChatMessage:
        """Turn the text of a completion into an assistant message.

        - `reasoning_content`: the text before </think>; missing where there is none.
        - `content`: the rest of the text.
        - `tool_calls`: with `tools`, the tool calls written in the content, which are then removed
          from the content. If one call is malformed, all stay there, and the environment sees them.
        """
        message: ChatMessage = {"role": "assistant", "content": text}
        if THINK_END in text:
            thought, _, answer = text.partition(THINK_END)
            message["reasoning_content"] = thought.removeprefix("<think>").strip()
            message["content"] = answer.lstrip("\n")
        if tools:
            tool_calls = _parse_calls(message["content"])
            if tool_calls:
                message["tool_calls"] = tool_calls
                message["content"] = TOOL_CALL.sub("", message["content"]).strip()
        return message


def _parse_calls(content: str) -> list[dict[str, object]]:
    """The tool calls written in the text, in order; [] if there is none or one is malformed."""
    tool_calls = []
    for number, call_match in enumerate(TOOL_CALL.finditer(content), start=1):
        tool_call = _parse_call(call_match.group(1), number)
        if tool_call is None:
            return []
        tool_calls.append(tool_call)
    return tool_calls


def _parse_call(text: str, number: int) -> dict[str, object] | None:
    """Parse a tool call that a model wrote as JSON into OpenAI's form, with the id
    `call_<number>`. None if the text is not a JSON object with a `name`."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):  # ValueError: no JSON; RecursionError: nested too deeply
        return None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return None
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": parsed["name"], "arguments": parsed.get("arguments", {})},
    }
