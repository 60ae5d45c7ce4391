"""Turns conversations into token ids and loss masks, through a model's chat template.

The control side counts tokens with this module (`tokens.py`) and the worker trains and samples with
it (`engine/worker/rollouts/renderer.py`), so both see the same tokens.

Sampled text is never rendered again. The prompt of a later turn consists of the ids so far and the
text that the template writes between two turns. To get that text, a mark (a made-up word) stands
for what the model wrote; the template's own text follows the mark. So it does not matter that many
templates write earlier turns differently once more messages follow (Qwen3 drops their think blocks,
gpt-oss ends them with another token).

A conversation becomes several training rows if the template writes earlier turns differently: each
turn is trained after exactly the prompt that the model gets for that turn in use. The text is split
where the model starts and stops writing, and each part is tokenised by itself, so those prompts
have the ids that the sampler gets.

The package `renderers` (0.1.12) does the same with code written by hand for each family. It was
measured and not used: it takes 0.4 s to import (870 modules, `openai` among them, and it fails
without `httpx`) and 120 MB when installed; it identifies a family by the model's name on the hub,
so a local folder gets its fallback, which cannot continue a conversation, and so do Gemma 1 to 3,
Phi, LFM2 and Cohere. The method here needs nothing but the template.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.core.errors import UserError
from engine.models import template_messages
from engine.models.reasoning import opens_thought, tags_of
from engine.models.template_messages import Abilities
from engine.records.settings import Reasoning
from envs.json_types import ChatMessage, ToolSchema

_QUESTION: ChatMessage = {"role": "user", "content": "?"}
_MARK = "zqmark"  # stands for what the model wrote; lengthened if a message contains it
_SPECIAL_TOKEN = re.compile(r"<[|｜]?[^<>\s]+>")  # such as <|im_end|>


class TemplateError(ValueError):
    """A chat template refused a conversation, or left out what the model should learn."""


class NoReasoning(TemplateError):
    """An assistant turn has no reasoning although reasoning is required."""


@dataclass(frozen=True)
class RowShape:
    """Where a training row carries loss; all numbers count tokens from its beginning.

    Attributes:
        length: number of tokens of the whole row.
        turns: (start, end) of each assistant turn that this row trains. The end-of-turn token
            belongs to the turn; the opening that the generation prompt contains does not.
        known: how many tokens at the beginning are also in the conversation's previous row, so that
            they are not trained again; at least 1, since nothing predicts the first token.
        is_last: whether the conversation ends with this row.
    """

    length: int
    turns: Sequence[tuple[int, int]]
    known: int = 1
    is_last: bool = True

    def trained(self, loss_on: str = "assistant") -> Sequence[tuple[int, int]]:
        """Return (start, end) of each stretch of tokens that carries loss.

        Args:
            loss_on: "assistant" (all assistant turns), "last" (the conversation's last turn, which
                only its last row has) or "all" (every token that the previous row does not begin
                with).
        """
        if loss_on == "all":  # also user messages, but not in a row without an assistant turn
            has_new_tokens = self.known < self.length
            if not self.turns or not has_new_tokens:
                return []
            return [(self.known, self.length)]
        if loss_on == "last":
            return self.turns[-1:] if self.is_last else []
        return self.turns


@dataclass(frozen=True)
class TokenizedChat:
    """A conversation as tokens, or as much of it as fits one training row."""

    ids: list[int]
    shape: RowShape

    @property
    def turns(self) -> list[tuple[int, int]]:
        """(start, end) of each assistant turn among the ids."""
        return list(self.shape.turns)

    def mask(self, loss_on: str = "assistant") -> list[int]:
        """Return one number per token: 1 if the token carries loss, else 0.

        `loss_on`: "assistant" (all assistant turns), "last" (the conversation's last turn) or "all"
        (every token that the conversation's previous row does not begin with).
        """
        mask = [0] * len(self.ids)
        for start, end in self.shape.trained(loss_on):
            mask[start:end] = [1] * (end - start)
        return mask


@dataclass(frozen=True)
class _StandIn:
    """A replacement for a conversation that ends with an assistant turn. It is rendered to find the
    text that the template writes after that turn.

    Attributes:
        history: the messages before the turn.
        message: the assistant message; its words end with `mark`.
        mark: a word that no other message contains.
    """

    history: Sequence[ChatMessage]
    message: ChatMessage
    mark: str


@dataclass(frozen=True)
class ChatFormat:
    """How one model writes a conversation.

    Attributes:
        template: the source of its chat template.
        special_tokens: variables for the template, such as `eos_token`.
        encode: returns the token ids of a text; it must not add special tokens.
        stop_texts: the texts of the tokens that end a turn.
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
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        prompt: bool,
        thinking: bool | None = None,
    ) -> str:
        """Return the conversation as the template writes it. Tools, calls and results that the
        template cannot write are written into the messages (`template_messages.py`).

        Args:
            prompt: whether the text ends with the opening of an assistant turn, so that the model
                goes on from there.
            thinking: whether the template is asked to open a think block; None for `self.thinking`.

        Raises TemplateError with the template's own message if it refuses the conversation, and
        UserError MODEL_UNSUPPORTED if the template does not compile.
        """
        # Some models have a separate template for conversations with tools.
        source = self.tool_template if tools and self.tool_template else self.template
        messages = [template_messages.clean(message) for message in messages]
        if template_messages.needs_abilities(messages, tools):
            template_abilities = _abilities(source, tuple(sorted(self.special_tokens.items())))
            messages, tools = template_messages.adapt(messages, tools, template_abilities)
        variables = {
            **self.special_tokens,
            **_variables(messages, tools, prompt),
            "enable_thinking": self.thinking if thinking is None else thinking,
        }
        try:
            return _render(source, variables)
        except UserError:  # the template does not compile
            raise
        except Exception as error:  # a template is code from a model repository
            raise TemplateError(f"the chat template refused the messages: {error}") from error

    def prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> list[int]:
        """Return the token ids of the conversation, including the opening of the assistant's turn.

        Raises TemplateError if the template refuses the conversation.
        """
        return self.encode(self.text(messages, tools, prompt=True))

    def between_turns(
        self,
        before: Sequence[ChatMessage],
        replies: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        last_id: int | None = None,
    ) -> list[int]:
        """Return the token ids of what stands between two assistant turns, to be appended to the
        ids so far.

        They end with the opening of the next turn. They begin after the token that ended the
        earlier turn, or with that token if the turn lacks it because a stop string ended it.

        Args:
            before: the conversation so far, which ends with an assistant message.
            replies: the messages that answer it.
            last_id: the last sampled id of the assistant's turn; None if that was an end token.

        Raises TemplateError if the template refuses the replies.
        """
        first_refusal: TemplateError | None = None
        for stand_in in _stand_ins(before, replies):
            try:
                return self._after_turn(stand_in, replies, tools, last_id)
            except TemplateError as error:
                first_refusal = first_refusal or error
        assert first_refusal is not None  # `_stand_ins` yields at least two
        raise first_refusal

    def _after_turn(
        self,
        stand_in: _StandIn,
        replies: Sequence[ChatMessage],
        tools: Sequence[ToolSchema],
        last_id: int | None,
    ) -> list[int]:
        """Return the token ids that follow an assistant turn, up to and including the opening of
        the next turn. The end token of the turn is left out if it was sampled already.

        `last_id` is the last sampled id of the turn; None if that was an end token.
        """
        turn_end, following_text = self._turn_end_and_following_text(stand_in, replies, tools)
        if not turn_end:  # the template writes no end token after this turn
            return self._after_opening(following_text, last_id)
        if following_text.startswith(turn_end):
            after_end = self.encode(following_text[len(turn_end) :])
            if self._is_end(last_id):
                return after_end
            return [*self.encode(turn_end), *after_end]  # the turn stopped before its end token
        # Before further messages the template (of gpt-oss) ends a turn with another token than at
        # the end of a conversation. That other token is left out, as one was sampled in its place.
        other_end = _SPECIAL_TOKEN.match(following_text)
        if other_end and len(self.encode(other_end.group())) == 1 and self._is_end(last_id):
            following_text = following_text[other_end.end() :]
        return self.encode(following_text)

    def _after_opening(self, following_text: str, last_id: int | None) -> list[int]:
        """Return the token ids of `following_text`, which follows a turn without an end token.

        In such a family (GLM) the model ends its turn by writing the opening of the next message.
        That opening is left out of the result if the turn already ends with it, which is so if it
        is `last_id`, the last id of the turn. A `last_id` of None stands for any token that ends
        turns.
        """
        opening = self._stop_at_start(following_text)
        if opening and (last_id is None or self.encode(opening) == [last_id]):
            return self.encode(following_text[len(opening) :])
        return self.encode(following_text)

    def _turn_end_and_following_text(
        self, stand_in: _StandIn, replies: Sequence[ChatMessage], tools: Sequence[ToolSchema]
    ) -> tuple[str, str]:
        """Return what the template writes after the model's words in the last turn of `stand_in`, a
        conversation in which those words end with a mark (a made-up word).

        The result is two texts:

        - the token that ends the turn at the end of a conversation; "" if the template writes none
        - what follows the model's words if `replies` come next: the end of the turn, as the
          template writes it before a reply, the replies and the opening of the next turn
        """
        conversation = [*stand_in.history, stand_in.message]
        mark = stand_in.mark  # the last of the model's words
        # The text after the mark, if the conversation ends there and if replies follow.
        at_end = _text_after(mark, self.text(conversation, tools, prompt=False))
        with_replies = _text_after(mark, self.text([*conversation, *replies], tools, prompt=True))
        first_stop = self._first_stop(at_end)
        if first_stop:
            stop_at, stop = first_stop
            # Text before the end token, such as closing brackets of a call, is part of the turn.
            if with_replies[:stop_at] == at_end[:stop_at]:
                return stop, with_replies[stop_at:]
        # Without an end token, the text that both versions share still belongs to the turn.
        return "", with_replies[_common_start(at_end, with_replies) :]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Find the first token that ends a turn: (its position in the text, the token), or None."""
        stops = [(text.find(stop), stop) for stop in self.stop_texts if stop in text]
        return min(stops, default=None)

    def _stop_at_start(self, text: str) -> str:
        """Return the token that ends a turn with which `text` begins, or ""."""
        return next((stop for stop in self.stop_texts if text.startswith(stop)), "")

    def _is_end(self, last_id: int | None) -> bool:
        """Tell whether `last_id`, the last id of a turn, is a token that ends turns. None means
        yes."""
        return last_id is None or any(self.encode(stop) == [last_id] for stop in self.stop_texts)

    def rows(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        reasoning: Reasoning = "keep",
    ) -> list[TokenizedChat]:
        """Turn a finished conversation into training rows.

        There are several rows if the template writes earlier turns differently once more messages
        follow, and none if there is no assistant turn. `reasoning`: "keep" trains the reasoning in
        the messages, "drop" leaves it out, "require" raises NoReasoning for a turn without any.
        Raises TemplateError if the template refuses the conversation or leaves out the text of a
        turn.
        """
        messages = [_as_trained(message, reasoning) for message in messages]
        is_required = reasoning == "require"
        rows: list[TokenizedChat] = []
        row_text = ""  # the text of the last row
        for prompt, answer in self._prompts_and_turns(messages, tools, needs_reasoning=is_required):
            # If the template writes the earlier turns as before, this turn can join the last row.
            if rows and prompt.startswith(row_text):
                rows[-1] = self._with_next_turn(rows[-1], prompt[len(row_text) :], answer)
            else:
                rows.append(self._new_row(rows, prompt, answer))
            row_text = prompt + answer
        # Every row was made as if the conversation ended with it, which only the last one does.
        return [*map(_as_earlier_row, rows[:-1]), *rows[-1:]]

    def _prompts_and_turns(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], needs_reasoning: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield the assistant turns of a conversation as (prompt, what the model has to write).

        The prompt is the text up to the turn. Raises NoReasoning for a turn without reasoning if
        `needs_reasoning` is true.
        """
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if needs_reasoning and "reasoning_content" not in message:
                raise NoReasoning(f"message {index + 1} has no reasoning, and thinking requires it")
            yield self._prompt_and_turn(messages[:index], message, tools)

    def _with_next_turn(self, row: TokenizedChat, between: str, answer: str) -> TokenizedChat:
        """Return the row extended by the text `between` its last turn and the next, and by that
        next assistant turn, `answer`."""
        prompt_ids = row.ids + self.encode(between)
        return self._with_turn(prompt_ids, row.turns, row.shape.known, answer)

    def _new_row(self, rows: Sequence[TokenizedChat], prompt: str, answer: str) -> TokenizedChat:
        """Make a training row of one turn, the `answer` to `prompt`, that follows `rows` of the
        same conversation. The tokens that its prompt shares with the last of `rows` count as known:
        they are not trained again."""
        prompt_ids = self.encode(prompt)
        shared_count = _common_start(prompt_ids, rows[-1].ids) if rows else 0
        return self._with_turn(prompt_ids, turns=[], known=shared_count, answer=answer)

    def _with_turn(
        self, prompt_ids: list[int], turns: Sequence[tuple[int, int]], known: int, answer: str
    ) -> TokenizedChat:
        """Make a training row that ends with the turn `answer`.

        Args:
            prompt_ids: the tokens before that turn.
            turns: (start, end) of the assistant turns in `prompt_ids`.
            known: how many of `prompt_ids` the conversation's previous row begins with too.
        """
        start = len(prompt_ids)
        ids = prompt_ids + self.encode(answer)
        # At least 1 is known, because nothing predicts the first token.
        shape = RowShape(len(ids), [*turns, (start, len(ids))], known=max(1, known))
        return TokenizedChat(ids, shape)

    def _prompt_and_turn(
        self, history: Sequence[ChatMessage], message: ChatMessage, tools: Sequence[ToolSchema]
    ) -> tuple[str, str]:
        """Split the assistant turn `message`, which follows `history`, into (prompt, completion).

        The prompt is the text that the turn answers; it opens a think block if the message has
        reasoning, in `reasoning_content`. The completion is what the model has to write, including
        the end of the turn.
        """
        thought = message.get("reasoning_content", "")
        thinking = bool(thought)
        prompt = self.text(history, tools, prompt=True, thinking=thinking)
        text_with_turn = self.text([*history, message], tools, prompt=False, thinking=thinking)
        if text_with_turn.startswith(prompt) and self._writes_thought(history, message, tools):
            turn = text_with_turn[len(prompt) :]
        else:  # the template writes a finished turn in another way than the model has to
            turn = self._thought_in_tags(prompt, thought) + self._answer_text(
                history, message, tools
            )
        return prompt, self._up_to_end(turn, history, message, tools)

    def _thought_in_tags(self, prompt: str, thought: str) -> str:
        """Return a thought as the model writes it after `prompt`: between its tags, without the
        opening tag if the prompt ends with it. Returns "" if there is no thought and the prompt
        opened none."""
        is_open = opens_thought(prompt, self.template)
        if not thought and not is_open:
            return ""
        tags = tags_of(self.template)[-1]  # the last are those that the template itself writes
        opening = "" if is_open else tags.before
        return f"{opening}{thought}{tags.after}"

    def _answer_text(
        self, history: Sequence[ChatMessage], message: ChatMessage, tools: Sequence[ToolSchema]
    ) -> str:
        """Return the assistant turn `message` as the template writes it, without its reasoning.

        Raises TemplateError if the template leaves the message out.
        """
        plain = template_messages.without_reasoning(message)
        prompt = self.text(history, tools, prompt=True, thinking=False)
        whole = self.text([*history, plain], tools, prompt=False, thinking=False)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        # `whole` does not begin with the prompt, so a mark put before the content shows where the
        # answer begins.
        mark = _unused_mark([*history, message])
        text = self.text([*history, _with_mark(plain, mark)], tools, prompt=False, thinking=False)
        # Some templates leave out the content of a message with calls, and the mark with it.
        if mark not in text and plain.get("tool_calls"):
            return whole[_common_start(prompt, whole) :]
        answer = _text_after(mark, text)
        # Without content, line feeds after the mark only separate it from the calls that follow;
        # they are not part of the answer.
        return answer if plain.get("content") else answer.lstrip("\n")

    def _writes_thought(
        self, history: Sequence[ChatMessage], message: ChatMessage, tools: Sequence[ToolSchema]
    ) -> bool:
        """Tell whether the template writes the reasoning of this message. True if it has none."""
        if "reasoning_content" not in message:
            return True
        # A word that can come from nowhere else replaces the reasoning.
        mark = _unused_mark([*history, message])
        marked = {**message, "reasoning_content": mark}
        return mark in self.text([*history, marked], tools, prompt=False, thinking=True)

    def _up_to_end(
        self,
        turn: str,
        history: Sequence[ChatMessage],
        message: ChatMessage,
        tools: Sequence[ToolSchema],
    ) -> str:
        """Cut an assistant turn after its end token: the result is what the model has to write.

        In some families (GLM) the template writes no end token, because the token that opens the
        next message ends the turn. Then this opening is added.

        Args:
            turn: the text that the template writes from the beginning of the turn on.
            history: the messages before the turn.
            message: the message of the turn.
        """
        ends = [turn.rfind(stop) + len(stop) for stop in self.stop_texts if stop in turn]
        if ends:  # text after the end token, such as a newline, does not belong to the turn
            turn = turn[: max(ends)]
            return self._with_one_end(turn)
        reply = _reply_to(message)  # any message that can come next
        stand_in = next(_stand_ins([*history, message], [reply]))
        try:
            _, following_text = self._turn_end_and_following_text(stand_in, [reply], tools)
        except TemplateError:  # the template takes no reply: the turn ends with its text
            return turn
        return turn + self._stop_at_start(following_text)

    def _with_one_end(self, turn: str) -> str:
        """Return the turn with only the first of several end tokens in a row at its end, because
        the model stops at the first."""
        while last := next((stop for stop in self.stop_texts if turn.endswith(stop)), ""):
            without_last = turn.removesuffix(last).rstrip()
            if not without_last.endswith(tuple(self.stop_texts)):
                break
            turn = without_last
        return turn


def _as_earlier_row(row: TokenizedChat) -> TokenizedChat:
    """Return the row marked as one that does not end its conversation."""
    return TokenizedChat(row.ids, replace(row.shape, is_last=False))


def _reply_to(message: ChatMessage) -> ChatMessage:
    """Make a message that may follow the assistant's `message`: the result of its first call, or a
    question if it makes no call."""
    calls = message.get("tool_calls")
    if not calls:
        return _QUESTION
    function = calls[0].get("function", calls[0])  # a call may be the function itself
    name, call_id = function.get("name", ""), calls[0].get("id", "")
    return {"role": "tool", "content": "?", "name": name, "tool_call_id": call_id}


def _stand_ins(before: Sequence[ChatMessage], replies: Sequence[ChatMessage]) -> Iterator[_StandIn]:
    """Yield conversations to try in place of `before`, to learn what text the template writes after
    the last turn. In each, a mark that no message contains stands for what the model wrote there.

    - the conversation itself
    - a question and the turn, for a template that refuses something in the conversation
    - the same with only one call in the turn, for a template that takes no more calls at once
    """
    mark = _unused_mark([*before, *replies])
    calls = before[-1].get("tool_calls") or []
    with_all_calls = _marked_message(mark, calls)
    yield _StandIn(before[:-1], with_all_calls, mark)
    yield _StandIn([_QUESTION], with_all_calls, mark)
    if len(calls) > 1:
        yield _StandIn([_QUESTION], _marked_message(mark, calls[:1]), mark)


def _marked_message(mark: str, calls: Sequence[ChatMessage]) -> ChatMessage:
    """Make an assistant message with these calls, each with `mark` (a made-up word) as its only
    argument. Without calls, `mark` is the content of the message."""
    if not calls:
        return {"role": "assistant", "content": mark}
    marked_calls = []
    for call in calls:
        # A call holds its function under the key "function", or is the function itself.
        function = {**call.get("function", call), "arguments": {"a": mark}}
        marked_calls.append({**call, "function": function} if "function" in call else function)
    return {"role": "assistant", "content": "", "tool_calls": marked_calls}


def _common_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Count how many items at the beginning of both sequences are equal."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _unused_mark(messages: Sequence[ChatMessage]) -> str:
    """Return a word that no message contains: `_MARK`, followed by as many z as that takes."""
    mark = _MARK
    while any(mark in str(message) for message in messages):
        mark += "z"
    return mark


def _with_mark(message: ChatMessage, mark: str) -> ChatMessage:
    """Return the message with `mark` (a made-up word) before its content."""
    return {**message, "content": f"{mark}{message.get('content') or ''}"}


def _text_after(mark: str, text: str) -> str:
    """Return the text after the last `mark` (a made-up word). Raises TemplateError if it is
    missing."""
    if mark not in text:
        raise TemplateError("the chat template leaves out what the assistant says")
    return text.rpartition(mark)[2]


def _as_trained(message: ChatMessage, reasoning: Reasoning) -> ChatMessage:
    """Return an assistant message with its reasoning in `reasoning_content` only, or with none if
    `reasoning` is "drop". Other messages are returned unchanged."""
    if message["role"] != "assistant":
        return message
    message = template_messages.split_reasoning(message)
    return template_messages.without_reasoning(message) if reasoning == "drop" else message


def _variables(
    messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], prompt: bool
) -> dict[str, object]:
    """Return a template's variables that hold the conversation. `prompt` asks the template to open
    an assistant turn at the end, so that the model goes on with an answer."""
    return {
        "messages": list(messages),
        "tools": list(tools) or None,  # templates test for None
        "documents": None,
        "add_generation_prompt": prompt,
    }


@lru_cache(maxsize=16)
def _abilities(source: str, special_tokens: tuple[tuple[str, str], ...]) -> Abilities:
    """Find out which parts of a conversation with tools the template `source` writes by itself.

    `special_tokens` holds (name, text) pairs, not a dict, because cache keys must be hashable.
    """

    def render(messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], prompt: bool) -> str:
        """Render a trial conversation; `prompt` adds the opening of the next turn."""
        variables = {**dict(special_tokens), **_variables(messages, tools, prompt)}
        return _render(source, variables)

    return template_messages.abilities(render)


def _render(source: str, variables: Mapping[str, object]) -> str:
    """Render the chat template `source` with these variables."""
    # jinja2 takes 40 ms to import, which a start of the server does not need.
    from engine.models import chat_template  # noqa: PLC0415

    return chat_template.render(source, variables)
