"""Token counts without torch: what the trainer will see, before it starts."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models import model_files
from engine.models.chat_format import ChatFormat

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens written out."""
        return str(self.backend.decode(ids, skip_special_tokens=False))

    def count(self, text: str) -> int:
        """Number of tokens of `text`."""
        return len(self.encode(text))

    def format(self, thinking: bool = False) -> ChatFormat:
        """How this model writes conversations; `thinking` asks the template for a think block."""
        return ChatFormat(
            template=self.template,
            special_tokens=self.special,
            encode=self.encode,
            stop_texts=self.stop_texts,
            thinking=thinking,
            tool_template=model_files.tool_template(self.folder),
        )

    @cached_property
    def stop_texts(self) -> list[str]:
        """Texts of the tokens that end a turn: the tokenizer's own, then the model's others."""
        texts = [self.special["eos_token"]] if self.special.get("eos_token") else []
        for name in ("config.json", "generation_config.json"):
            path = self.folder / name
            stored = model_files.load_json(path).get("eos_token_id") if path.is_file() else None
            for token in stored if isinstance(stored, list) else [stored]:
                if isinstance(token, int) and (text := self.backend.id_to_token(token)):
                    texts.append(text)
        return list(dict.fromkeys(texts))


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
