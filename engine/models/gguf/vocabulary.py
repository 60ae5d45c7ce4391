"""Reads the tokenizer of a model folder and gives its parts under GGUF's keys.

A GGUF file only names the rule that cuts text into words. The name is that of the rule in
`tokenizer.PRE_TOKENIZERS` which equals the tokenizer's own. A tokenizer with another rule is
refused, because a reader of the file would give the model other tokens than it was trained on.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models

from engine.core.files import JsonObject
from engine.models import model_files
from engine.models.gguf.tokenizer import NORMALIZED, PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of token
_END_OF_TEXT = "tokenizer.ggml.eos_token_id"
# GGUF's keys for the ids of tokens, by the names of the tokens in tokenizer_config.json.
_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": _END_OF_TEXT,
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class NotExportable(ValueError):
    """A model that cannot be written as GGUF; the text says why."""


def read(folder: Path, rows: int) -> JsonObject:
    """Return the tokenizer and the chat template of the model in `folder`, under GGUF's keys.

    `rows` is the number of rows of the embedding matrix; a row without a token gets a placeholder.
    Raises NotExportable if the tokenizer is not BPE or GGUF has no name for a part of it, UserError
    MODEL_UNSUPPORTED if a file cannot be read.
    """
    state = model_files.load_json(folder / "tokenizer.json")
    model = state.get("model") or {}
    if model.get("type") != "BPE":
        raise NotExportable(f"its tokenizer is {model.get('type')}, not BPE")
    vocabulary = _vocabulary(state, rows)
    tokens = vocabulary.tokens()
    types = vocabulary.types()
    values: JsonObject = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.add_bos_token": False,  # the chat template writes it
        "tokenizer.chat_template": model_files.chat_template(folder),
    }
    if model.get("byte_fallback"):  # SentencePiece writes unknown characters as tokens of bytes
        values |= _sentence_piece(state, tokens)
        types = _with_byte_tokens(types, tokens)
    else:
        values |= _byte_level(state)
    values["tokenizer.ggml.token_type"] = types
    return values | _special_ids(folder, vocabulary.ids())


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens of a model by their ids.

    Attributes:
        texts: the texts of all tokens.
        added: the entries of tokenizer.json for tokens that were added to the vocabulary.
        rows: the number of rows of the embedding matrix. There may be more rows than tokens.
    """

    texts: dict[int, str]
    added: dict[int, JsonObject]
    rows: int

    def ids(self) -> dict[str, int]:
        """Return the id of every token by its text."""
        return {text: token_id for token_id, text in self.texts.items()}

    def tokens(self) -> list[str]:
        """Return the text of each row's token. An id without a token gets a placeholder such as
        "[PAD7]"."""
        return [self.texts.get(token_id, f"[PAD{token_id}]") for token_id in range(self.rows)]

    def types(self) -> list[int]:
        """Return GGUF's type of each row's token, except that tokens of single bytes are not told
        apart."""
        return [self._type_of(token_id) for token_id in range(self.rows)]

    def _type_of(self, token_id: int) -> int:
        """Return GGUF's type of the token with this id. An id without a token is _UNUSED, since its
        row of the embedding matrix is only padding."""
        if token_id not in self.texts:
            return _UNUSED
        if token_id not in self.added:
            return _NORMAL
        if self.texts[token_id] == "<unk>":
            return _UNKNOWN
        return _CONTROL if self.added[token_id].get("special") else _USER_DEFINED


def _vocabulary(state: JsonObject, rows: int) -> _Vocabulary:
    """Collect the tokens from `state` (the content of tokenizer.json) of a model whose embedding
    has `rows` rows. Raises NotExportable if a token has no row."""
    added = {entry["id"]: entry for entry in state.get("added_tokens") or []}
    texts = {token_id: text for text, token_id in state["model"]["vocab"].items()}
    # Added tokens may be missing in the vocabulary itself.
    texts |= {token_id: entry["content"] for token_id, entry in added.items()}
    if max(texts) >= rows:
        raise NotExportable(f"its tokenizer has the id {max(texts)}, its embedding {rows} rows")
    return _Vocabulary(texts, added, rows)


def _merges(model: JsonObject) -> list[list[str]]:
    """Return the two tokens of each merge. tokenizer.json stores a merge as a pair, or as one text
    with a space between the two."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]


def _with_byte_tokens(types: list[int], tokens: list[str]) -> list[int]:
    """Return `types`, GGUF's types of the `tokens`, in which tokens of a single byte, such as
    "<0x0A>", have the type of a byte instead of the one given."""
    pairs = zip(tokens, types, strict=True)
    return [_BYTE if _is_byte(token) else token_type for token, token_type in pairs]


def _byte_level(state: JsonObject) -> JsonObject:
    """Return the values of a byte-level BPE tokenizer, such as GPT-2's, under GGUF's keys.

    `state` is the content of tokenizer.json. Raises NotExportable if GGUF has no name for the rule
    that cuts text into words.
    """
    merges = _merges(state["model"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _rule(state),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
    }


def _is_byte(token: str) -> bool:
    """Tell whether a token stands for a single byte, such as "<0x0A>"."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _sentence_piece(state: JsonObject, tokens: list[str]) -> JsonObject:
    """Return the values of a SentencePiece tokenizer under GGUF's keys.

    GGUF stores no merges for such a tokenizer, but a score per token: the earlier the merge that
    makes a token, the higher its score. `state` is the content of tokenizer.json. Raises
    NotExportable if the tokenizer prepares text in another way than Llama 2's.
    """
    merges = _merges(state["model"])
    normalizer = state.get("normalizer") or {}
    steps = normalizer.get("normalizers") or [normalizer]  # a sequence, or one step by itself
    # Llama 2 writes a mark for each space (Replace), and one before the text (Prepend).
    step_types = [step.get("type") for step in steps]
    if step_types not in (["Prepend", "Replace"], ["Replace"]):
        raise NotExportable(f"its tokenizer prepares text by {step_types}")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": _scores(tokens, merges),
        "tokenizer.ggml.add_space_prefix": step_types[0] == "Prepend",
    }


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Return the score of each token: the earlier the merge that makes the token, the higher."""
    merge_order: dict[str, int] = {}  # token -> place of the first merge that makes it
    for left, right in merges:
        merge_order.setdefault(left + right, len(merge_order))
    after_all = len(merge_order)  # for tokens that no merge makes
    return [-float(merge_order.get(token, after_all)) for token in tokens]


def _rule(state: JsonObject) -> str:
    """Return GGUF's name of the rule that cuts text into words. The name also covers how text is
    normalized, and whether a word that is itself a token skips the merges.

    `state` is the content of tokenizer.json. Raises NotExportable if GGUF has no name for the rule.
    """
    ignores_merges = bool(state["model"].get("ignore_merges"))
    normalizer = (state.get("normalizer") or {}).get("type")
    rule = _comparable(state.get("pre_tokenizer"))
    for name, make in PRE_TOKENIZERS.items():
        # A tokenizer with the rule of that name, to compare as JSON.
        example = Tokenizer(models.BPE())
        example.pre_tokenizer = make()
        known_rule = _comparable(json.loads(example.to_str())["pre_tokenizer"])
        known_normalizer = "NFC" if name in NORMALIZED else None
        known_ignores_merges = name == "llama-bpe"
        if (rule, normalizer, ignores_merges) == (
            known_rule,
            known_normalizer,
            known_ignores_merges,
        ):
            return name
    raise NotExportable("GGUF has no name for the rule by which its tokenizer cuts words")


def _comparable(rule: object) -> object:
    """Copy a rule of a tokenizer, or a part of one, into a form in which equal rules compare as
    equal.

    "trim_offsets" is left out, because it does not change the ids of tokens. A "ByteLevel" always
    gets "use_regex", whose default (true) some files leave out.
    """
    if isinstance(rule, list):
        return [_comparable(part) for part in rule]
    if isinstance(rule, dict):
        copy = {key: _comparable(value) for key, value in rule.items() if key != "trim_offsets"}
        if copy.get("type") == "ByteLevel":
            copy.setdefault("use_regex", True)
        return copy
    return rule


def _special_ids(folder: Path, ids: dict[str, int]) -> JsonObject:
    """Return the ids of the special tokens (such as the end of a text) under GGUF's keys.

    `ids` maps the text of every token to its id. Raises NotExportable if no token ends a text.
    """
    settings = model_files.load_json(folder / "tokenizer_config.json")
    values = _named_ids(settings, ids)
    end_ids = _end_ids(folder)
    if end_ids:
        values.setdefault(_END_OF_TEXT, end_ids[0])
        others = [token_id for token_id in end_ids if token_id != values[_END_OF_TEXT]]
        if others:  # GGUF has a key for one more, the end of a turn; the rest are left out
            values["tokenizer.ggml.eot_token_id"] = others[0]
    if _END_OF_TEXT not in values:
        raise NotExportable("its tokenizer names no end token")
    return values


def _named_ids(settings: JsonObject, ids: dict[str, int]) -> JsonObject:
    """Return the ids of the special tokens that tokenizer_config.json names, under GGUF's keys.

    `settings` is the content of that file, `ids` maps the text of a token to its id. Special tokens
    without an id are left out.
    """
    values: JsonObject = {}
    for name, key in _SPECIAL_KEYS.items():
        text = settings.get(name)
        if isinstance(text, dict):  # a token with its properties
            text = text.get("content")
        if isinstance(text, str) and text in ids:
            values[key] = ids[text]
    return values


def _end_ids(folder: Path) -> list[int]:
    """Return the ids that end an answer: those of generation_config.json, or of config.json if the
    former names none. Returns [] if neither names any."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            stored = model_files.load_json(folder / name).get("eos_token_id")
            candidates = stored if isinstance(stored, list) else [stored]
            end_ids = [end_id for end_id in candidates if isinstance(end_id, int)]  # [] for null
            if end_ids:
                return end_ids
    return []
