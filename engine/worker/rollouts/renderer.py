"""Converts messages to token ids through the model's own chat template, and back.

`engine/models/chat_format.py` renders and masks, and `engine/models/dialects/` reads what the model
wrote; this module turns their refusals into failures of the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from engine.models.chat_format import ChatFormat, NoReasoning, TemplateError
from engine.models.dialects.dialects import Reply, ReplyReader, reader_of
from engine.models.reasoning import Span, opens_thought
from engine.records.settings import Reasoning
from engine.worker.core.failures import WorkerFailure
from envs.json_types import ChatMessage, ToolSchema


@dataclass(frozen=True)
class Rendered:
    """A conversation as token ids, with a mask of the same length: 1 if a token is trained, else
    0."""

    ids: list[int]
    loss_mask: list[int]


class Renderer:
    """A tokenizer, its chat template, and the tokens that end a turn."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], *, thinking: bool = False
    ) -> None:
        """Convert with this tokenizer and its chat template. Raises WorkerFailure (kind config) if
        it has no template.

        Args:
            stop_ids: every id that ends a turn; the first is the one that the template writes.
            thinking: whether the template is asked to open a think block.
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
        self._stop_texts = [str(tokenizer.decode([stop_id])) for stop_id in stop_ids]

    @property
    def _format(self) -> ChatFormat:
        """The chat template and the tokens it uses, as a `ChatFormat`, which renders and masks."""
        # One template, or several by name, of which "tool_use" is for conversations with tools.
        templates = self.tokenizer.chat_template
        return ChatFormat(
            template=self.tokenizer.get_chat_template(),
            tool_template=templates.get("tool_use", "") if isinstance(templates, dict) else "",
            special_tokens=self.tokenizer.special_tokens_map,
            encode=self.encode,
            stop_texts=self._stop_texts,
            thinking=self.thinking,
        )

    def text(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], *, prompt: bool
    ) -> str:
        """Return the conversation as the template writes it; with `prompt`, it ends with the
        opening of the next assistant turn.

        Raises:
            TemplateError: the template refuses the messages.
        """
        return self._format.text(messages, tools, prompt=prompt)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text that the template wrote. Special tokens in the text are
        recognised, and none are added."""
        if not text:
            return []
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> list[int]:
        """Return the token ids of the conversation as the chat template writes it with these tools,
        up to and including the opening of the next assistant turn."""
        return self._format.prompt(messages, tools)

    def between_turns(
        self,
        before: Sequence[ChatMessage],
        replies: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        last_id: int | None = None,
    ) -> list[int]:
        """Return the ids to append after an assistant turn: what the template writes from its end
        to the opening of the next assistant turn, including `replies`, the environment's messages.
        Raises WorkerFailure (kind config) if the template refuses the replies.

        Args:
            before: the conversation so far; it ends with that assistant turn.
            last_id: the last sampled id of that turn; None for its end token. A turn that did not
                end with such a token gets one.
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
        """Turn a finished conversation into training rows: one, or several if the template writes
        earlier turns differently once more messages follow. Rows without a token to train are left
        out. Raises WorkerFailure (kind data) if the template refuses the messages.

        Args:
            loss_on: `assistant` trains every assistant turn, `last` only the last of them, `all`
                every token but the first.
            reasoning: "keep" trains the reasoning in the messages, "drop" leaves it out, and
                "require" gives [] for a conversation in which a turn has none.
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
        """Return the text of a completion's ids. If the last id ended the turn, it is left out;
        other special tokens stay in the text."""
        ids = list(ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def token_text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with all special tokens written out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def opens_thought(self) -> bool:
        """Whether prompts end with the opening of a thought, so that completions begin inside it.
        This is tried once, on a short prompt."""
        prompt = self.text([{"role": "user", "content": "?"}], (), prompt=True)
        return opens_thought(prompt, self._format.template)

    @cached_property
    def _replies(self) -> ReplyReader:
        """The reader of replies in the dialect that the chat template writes."""
        return reader_of(self._format)

    def reply(self, text: str, tools: Sequence[ToolSchema]) -> Reply:
        """Read the text of a completion in the model's dialect: its content, reasoning and tool
        calls, and which of the calls are invalid; see `ReplyReader.read`."""
        return self._replies.read(text, tools)

    def certain_text(self, text: str, tools: Sequence[ToolSchema]) -> str:
        """Return the beginning of an unfinished reply that is content whatever follows, so that it
        can be sent to the client now; see `ReplyReader.certain`.

        Without tools, thoughts count as content. With tools they are separated once the reply is
        whole, so a reply that begins inside a thought gives "".
        """
        if tools and self.opens_thought:
            return ""
        return self._replies.certain(text, tools)

    def thought_spans(self, text: str) -> list[Span]:
        """Return (start, end), in characters, of each thought in the text of a completion, by the
        tags or channels of the template."""
        return self._replies.thoughts.spans(text, self.opens_thought)

    def assistant_message(self, text: str, tools: Sequence[ToolSchema]) -> ChatMessage:
        """Turn the text of a completion into an assistant message, with `reasoning_content` and
        `tool_calls` if there are any; see `ReplyReader.read`."""
        return self.reply(text, tools).message
