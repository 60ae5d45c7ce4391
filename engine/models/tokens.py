"""Chat templates and token counts without torch: what the trainer will see, before it starts.

Rendering follows transformers' `apply_chat_template`: the same sandboxed jinja environment, the
same extras (raise_exception, strftime_now, tojson without HTML escapes, loop controls, the
`generation` tag), so that a template renders here exactly as there. Templates come from model
repositories and are untrusted: the sandbox keeps them from Python.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine.models import model_files

if TYPE_CHECKING:
    import jinja2
    from jinja2.ext import Extension
    from tokenizers import Tokenizer

Message = dict[str, Any]
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class TemplateError(ValueError):
    """A chat template refused a conversation, or does not keep the prompt as its beginning."""


@dataclass(frozen=True)
class Rendered:
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


class ChatTokenizer:
    """The tokenizer and chat template of a model folder. Use `load`, which keeps the last ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.template = model_files.chat_template(folder)
        config = folder / "tokenizer_config.json"
        settings = model_files.load_json(config) if config.is_file() else {}
        self.special = {name: text for name in _SPECIAL if (text := _text(settings.get(name)))}

    @cached_property
    def backend(self) -> "Tokenizer":
        from tokenizers import Tokenizer  # noqa: PLC0415  a native library, only where text counts

        path = self.folder / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise model_files.unsupported(
                f"{path} cannot be read: {error}", "Save the tokenizer again with save_pretrained."
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """Content hash of everything that decides token counts."""
        digest = hashlib.sha256((self.folder / "tokenizer.json").read_bytes())
        digest.update(json.dumps([self.template, self.special], sort_keys=True).encode())
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: a template writes its own special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def count(self, text: str) -> int:
        """Number of tokens of `text`."""
        return len(self.encode(text))

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        generation: bool = False,
        thinking: bool = False,
    ) -> str:
        """The conversation as text; `generation` ends it where the assistant goes on.

        Raises TemplateError with the template's own words when it refuses the messages.
        """
        values = {
            **self.special,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": generation,
            "enable_thinking": thinking,
        }
        template = _compiled(self.template)
        try:
            return template.render(**values)
        except Exception as error:  # a template is code from a model repository
            raise TemplateError(f"the chat template refused the messages: {error}") from error

    def prompt(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = False,
    ) -> list[int]:
        """Token ids of a prompt, up to where the assistant goes on."""
        return self.encode(self.render(messages, tools=tools, generation=True, thinking=thinking))

    def conversation(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = False,
    ) -> Rendered:
        """A finished conversation, up to the end of its last assistant turn.

        Cut where the model starts and stops writing and encoded piece by piece, as the worker's
        renderer does, so that counts agree with what is trained to the token.
        Raises TemplateError when a turn is no continuation of its own prompt.
        """
        ids: list[int] = []
        turns: list[tuple[int, int]] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(messages[:index], tools=tools, generation=True, thinking=thinking)
            whole = self.render(messages[: index + 1], tools=tools, thinking=thinking)
            if not (prompt.startswith(done) and whole.startswith(prompt)):
                raise TemplateError(
                    f"the chat template does not continue its own prompt at message {index + 1}"
                )
            end = self._end_of_turn(whole)
            ids += self.encode(prompt[len(done) :])
            start = len(ids)
            ids += self.encode(whole[len(prompt) : end])
            turns.append((start, len(ids)))
            done = whole[:end]
        return Rendered(ids, turns)

    @cached_property
    def stop_texts(self) -> list[str]:
        """Texts of the tokens that end a turn: the tokenizer's own, then the model's others."""
        texts = [self.special["eos_token"]] if self.special.get("eos_token") else []
        for name in ("config.json", "generation_config.json"):
            path = self.folder / name
            found = model_files.load_json(path).get("eos_token_id") if path.is_file() else None
            for token in found if isinstance(found, list) else [found]:
                if isinstance(token, int) and (text := self.backend.id_to_token(token)):
                    texts.append(text)
        return list(dict.fromkeys(texts))

    def _end_of_turn(self, closed: str) -> int:
        """Where the last turn's end token ends; templates write a newline or so after it."""
        ends = [closed.rfind(stop) + len(stop) for stop in self.stop_texts if stop in closed]
        return max(ends) if ends else len(closed)


def load(folder: Path) -> ChatTokenizer:
    """The tokenizer of a model folder, read once while its files stay as they are."""
    times = tuple(
        (name, path.stat().st_mtime_ns)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        if (path := folder / name).is_file()
    )
    return _load(folder, times)


@lru_cache(maxsize=8)
def _load(folder: Path, _times: tuple[tuple[str, int], ...]) -> ChatTokenizer:
    return ChatTokenizer(folder)


def _text(token: Any) -> str:
    """A special token as text: older files hold {"content": ...}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


@lru_cache(maxsize=16)
def _compiled(source: str) -> "jinja2.Template":
    import jinja2  # noqa: PLC0415  only where a template is rendered

    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise model_files.unsupported(
            f"the chat template does not compile: {error}", "Correct chat_template.jinja."
        ) from error


def _environment() -> "jinja2.Environment":
    import jinja2.ext  # noqa: PLC0415  only where a template is rendered
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415  as above

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_tag(), jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


@lru_cache(maxsize=1)
def _generation_tag() -> "type[Extension]":
    """The tag {% generation %}...{% endgeneration %}: transformers marks assistant turns with it,
    here it only has to render."""
    from jinja2 import nodes  # noqa: PLC0415  only where a template is rendered
    from jinja2.ext import Extension  # noqa: PLC0415  as above

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  jinja declares it a plain set

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_body")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _body(self, caller: Any) -> str:
            return caller()

    return Generation


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    import jinja2  # noqa: PLC0415  only where a template is rendered

    raise jinja2.TemplateError(message)
