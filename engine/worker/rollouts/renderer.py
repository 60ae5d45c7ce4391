"""Messages to token ids through the model's own chat template, and back.

Text is cut where the model starts and stops writing, and each piece is tokenised by itself: then
the prompt of a training row is, id for id, the prompt the sampler was given. A template that
rewrites history (so that a prompt is no prefix of what follows it) is refused for training rows.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.worker.core.failures import WorkerFailure

Message = dict[str, Any]
TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
THINK_END = "</think>"


@dataclass(frozen=True)
class Rendered:
    """One conversation as ids, with 1 where a token is trained."""

    ids: list[int]
    loss_mask: list[int]


class Renderer:
    """A tokenizer, its chat template, and the tokens that end a turn.

    Args:
        tokenizer: with a chat template.
        stop_ids: every id that ends a turn; the first is the one the template writes.
        thinking: whether the template is asked to open a think block.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], *, thinking: bool = False
    ) -> None:
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

    def text(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, prompt: bool
    ) -> str:
        """The conversation as the template writes it; `prompt` opens the next assistant turn."""
        rendered = self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=prompt,
            enable_thinking=self.thinking,
        )
        return str(rendered)

    def encode(self, text: str) -> list[int]:
        """Ids of template text: special tokens in it are read as such, none are added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Ids up to and including the opening of the assistant's turn."""
        return self.encode(self.text(messages, tools, prompt=True))

    def between_turns(
        self,
        before: Sequence[Message],
        replies: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Ids to append after an assistant turn's end token: what the template writes between it
        and the next assistant turn, `replies` included. `before` ends with the assistant.

        Raises:
            WorkerFailure: kind config, when the template rewrites what was said before.
        """
        closed = self.text(before, tools, prompt=False)
        opened = self.text([*before, *replies], tools, prompt=True)
        if not opened.startswith(closed):
            raise WorkerFailure(
                "config",
                "The chat template rewrites earlier turns, so several turns cannot be trained.",
                hint="Set thinking false, or use a model whose template keeps history unchanged.",
            )
        return self.encode(self._after_stop(closed) + opened[len(closed) :])

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], loss_on: str
    ) -> Rendered:
        """A finished conversation with its loss mask.

        Args:
            loss_on: `assistant` trains every assistant turn and its end token, `last` the last of
                them, `all` every token but the first.

        Raises:
            WorkerFailure: kind data, when a turn is no continuation of its own prompt.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        ids: list[int] = []
        mask: list[int] = []
        done = ""
        for turn in turns:
            prompt = self.text(messages[:turn], tools, prompt=True)
            whole = self.text(messages[: turn + 1], tools, prompt=False)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise WorkerFailure(
                    "data",
                    "The chat template does not continue its own prompt, so a loss mask would lie.",
                    evidence=f"turn {turn} of {len(messages)} messages",
                    hint="Use loss_on=last with single-turn rows, or another model's template.",
                )
            tail = self._after_stop(whole)
            before = self.encode(prompt[len(done) :])
            said = self.encode(whole[len(prompt) : len(whole) - len(tail)])
            trained = int(loss_on != "last" or turn == turns[-1])
            ids += before + said
            mask += [0] * len(before) + [trained] * len(said)
            done = whole[: len(whole) - len(tail)]
        if loss_on == "all" and ids:
            mask = [0] + [1] * (len(ids) - 1)
        return Rendered(ids, mask)

    def completion_text(self, ids: Sequence[int]) -> str:
        """What the model wrote, without the token that ended its turn; nothing else is hidden."""
        ids = list(ids)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    @property
    def opens_thought(self) -> bool:
        """Whether the prompt itself opens the think block, so that completions start inside it."""
        asked = self.text([{"role": "user", "content": "?"}], (), prompt=True)
        return asked.rstrip().endswith("<think>")

    def assistant_message(self, text: str, *, tools: bool) -> Message:
        """The text as a message: thought apart from content, tool calls parsed when there are
        tools. A call that is no JSON stays in the content, for the environment to see."""
        message: Message = {"role": "assistant", "content": text}
        if THINK_END in text:
            thought, _, said = text.partition(THINK_END)
            message["reasoning_content"] = thought.removeprefix("<think>").strip()
            message["content"] = said.lstrip("\n")
        if tools:
            calls = []
            for number, match in enumerate(TOOL_CALL.finditer(message["content"]), 1):
                call = _parse_call(match.group(1), number)
                if call is None:
                    return message
                calls.append(call)
            if calls:
                message["tool_calls"] = calls
                message["content"] = TOOL_CALL.sub("", message["content"]).strip()
        return message

    def _after_stop(self, closed: str) -> str:
        """What a template writes after the last turn's end token (a newline, usually)."""
        ends = [closed.rfind(stop) + len(stop) for stop in self._stop_texts if stop in closed]
        return closed[max(ends) :] if ends else ""


def _parse_call(text: str, number: int) -> dict[str, Any] | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": call["name"], "arguments": call.get("arguments", {})},
    }
