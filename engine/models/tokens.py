"""A model's tokenizer without torch, to count tokens before a trainer starts."""

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

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTokenizer:
    """The tokenizer and chat template of a model folder. Use `load`, which caches them.

    Attributes:
        template: the source of the chat template.
        special: the texts of the model's special tokens by their names, such as
            {"eos_token": "</s>"}.
    """

    def __init__(self, folder: Path) -> None:
        """Load the chat template and the special tokens of the model in `folder`.

        Special tokens that the model does not have are left out of `special`.
        """
        self.folder = folder
        self.template = model_files.chat_template(folder)
        config = folder / "tokenizer_config.json"
        settings = model_files.load_json(config) if config.is_file() else {}
        texts = {name: _token_text(settings.get(name)) for name in _SPECIAL_TOKENS}
        self.special = {name: text for name, text in texts.items() if text}

    @cached_property
    def backend(self) -> "Tokenizer":
        """The tokenizer as an object of the library `tokenizers`.

        Raises UserError MODEL_UNSUPPORTED if tokenizer.json cannot be read.
        """
        from tokenizers import Tokenizer  # noqa: PLC0415  a native library, only needed to tokenise

        path = self.folder / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise model_files.unsupported(
                f"{path} cannot be read: {error}", "Save the tokenizer again with save_pretrained."
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that token counts depend on: tokenizer, template and special
        tokens."""
        digest = hashlib.sha256((self.folder / "tokenizer.json").read_bytes())
        digest.update(json.dumps([self.template, self.special], sort_keys=True).encode())
        return digest.hexdigest()

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token by its text, including added and special tokens. Models with equal
        vocabularies read the same ids alike."""
        return self.backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`. No special tokens are added: the chat template writes
        them."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with special tokens written out."""
        return str(self.backend.decode(ids, skip_special_tokens=False))

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`."""
        return len(self.encode(text))

    def format(self, thinking: bool = False) -> ChatFormat:
        """Return how this model writes conversations. `thinking` asks its template for a think
        block."""
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
        """The texts of the tokens that end a turn, each once.

        The tokenizer's eos token comes first, then the tokens in `eos_token_id` (a number or a
        list) of config.json and generation_config.json.
        """
        texts = [self.special.get("eos_token")]
        for name in ("config.json", "generation_config.json"):
            token_ids = _end_token_ids(self.folder / name)
            texts += [self.backend.id_to_token(token_id) for token_id in token_ids]
        # None: an id without a token, or no eos token.
        return list(dict.fromkeys(text for text in texts if text))  # each once, in order


def _end_token_ids(config: Path) -> list[int]:
    """Return the ids in `eos_token_id` (a number or a list) of the file `config`. Returns [] if the
    file does not exist or has no such entry."""
    if not config.is_file():
        return []
    token_ids = model_files.load_json(config).get("eos_token_id")
    if not isinstance(token_ids, list):
        token_ids = [token_ids]
    return [token_id for token_id in token_ids if isinstance(token_id, int)]


def load(folder: Path) -> ChatTokenizer:
    """Return the tokenizer of a model folder. The result is cached until the folder's files change,
    which their modification times show."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    paths = [folder / name for name in names]
    file_times = tuple((path.name, path.stat().st_mtime_ns) for path in paths if path.is_file())
    return _load_cached(folder, file_times)


@lru_cache(maxsize=8)
def _load_cached(folder: Path, _times: tuple[tuple[str, int], ...]) -> ChatTokenizer:
    """Load the tokenizer of a folder. `_times`, when its files last changed, only belongs to the
    cache key, so that a changed file is read again."""
    return ChatTokenizer(folder)


def _token_text(token: Any) -> str:
    """Return the text of a special token in tokenizer_config.json: "TEXT" or {"content": "TEXT"}.

    Returns "" for anything else, such as null for a token that the model does not have.
    """
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
