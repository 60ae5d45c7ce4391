"""The tokenizer of a GGUF file, written as tokenizer.json, tokenizer_config.json and
chat_template.jinja.

A GGUF file stores the vocabulary, the merges and the name of the rule that cuts text into words
(`tokenizer.ggml.pre`). A rule that is not in `PRE_TOKENIZERS` is refused: with another rule the
model would read other tokens than it was trained on.

Source of the rules: the tokenizer.json of the models named beside them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers.pre_tokenizers import PreTokenizer


class NotImportable(ValueError):
    """A GGUF file that cannot be turned into a model folder; the text says why."""


class Values(Protocol):
    """The metadata of a GGUF file, with the methods of `importer._Metadata`."""

    def get(self, key: str) -> Any:
        """Return the value of `key`, or None if the file lacks the key."""
        ...

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the number at `key`, or `default` if the file lacks the key."""
        ...

    def text(self, key: str, default: str | None = None) -> str:
        """Return the text at `key`, or `default` if the file has no text there."""
        ...


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _words_by_pattern(pattern: str) -> PreTokenizer:
    """Make the rule that cuts text into words by the regular expression `pattern`, and then writes
    each byte of a word as one character, as GPT-2 does."""
    return pre.Sequence(
        [
            pre.Split(Regex(pattern), behavior="isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> PreTokenizer:
    """Make the rule that makes each digit a word of its own and cuts the rest into words as GPT-2
    does."""
    return pre.Sequence(
        [
            pre.Digits(individual_digits=True),
            pre.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


# The rules by the names that GGUF files use for them (llama.cpp's convert_hf_to_gguf.py).
PRE_TOKENIZERS = {
    "smollm": _single_digits,  # SmolLM, SmolLM2
    "qwen2": lambda: _words_by_pattern(_QWEN2),  # Qwen2, 2.5, 3
    "deepseek-r1-qwen": lambda: _words_by_pattern(_QWEN2),
    "llama-bpe": lambda: _words_by_pattern(_LLAMA3),  # Llama 3, 3.1, 3.2
    "gpt-2": lambda: pre.ByteLevel(add_prefix_space=False, use_regex=True),
}
NORMALIZED = {"qwen2", "deepseek-r1-qwen"}  # these models bring text to Unicode's form NFC first
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # types of token
# GGUF's keys for the ids of tokens, by the names of the tokens in tokenizer_config.json.
_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
WORD_START = "\u2581"  # what SentencePiece writes for a space


def write(folder: Path, values: Values) -> None:
    """Write the tokenizer's files to `folder`.

    Raises NotImportable if a part of the tokenizer is missing or its rule for words is not known.
    """
    tokens = _tokens(values)
    template = values.text("tokenizer.chat_template", default="")
    if not template:
        raise NotImportable("the file has no chat template (tokenizer.chat_template)")
    tokenizer = _tokenizer(values, tokens)
    _add_special_tokens(tokenizer, values, tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        **_named_tokens(values, tokens),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,  # the chat template writes it
        "model_max_length": int(1e30),  # how transformers writes that there is no limit
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")


def _named_tokens(values: Values, tokens: list[str]) -> dict[str, str]:
    """Return the texts of the special tokens by their names in tokenizer_config.json, such as
    {"eos_token": "</s>"}.

    Raises NotImportable if the file names no token that ends a text.
    """
    named: dict[str, str] = {}
    for name, key in _SPECIAL.items():
        token_id = int(values.number(key, default=-1))  # -1: the file names none
        if 0 <= token_id < len(tokens):  # a damaged file may name an id without a token
            named[name] = tokens[token_id]
    if "eos_token" not in named:
        raise NotImportable("the file names no end token (tokenizer.ggml.eos_token_id)")
    return named


def _add_special_tokens(tokenizer: Tokenizer, values: Values, tokens: list[str]) -> None:
    """Tell the tokenizer which tokens it must never split when they occur in a text. Their ids stay
    those of the vocabulary.

    Raises NotImportable unless there are as many token types as tokens.
    """
    types = values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise NotImportable(f"{len(tokens)} tokens have {len(types)} types")
    special: list[AddedToken] = []
    user_defined: list[AddedToken] = []
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_UNKNOWN, _CONTROL):
            special.append(_added_token(token))
        elif token_type == _USER_DEFINED:
            user_defined.append(_added_token(token))
    # Decoding can leave out special tokens; it always writes the user-defined ones.
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)


def _tokens(values: Values) -> list[str]:
    """Return the texts of the tokens in the order of their ids. Raises NotImportable if there are
    none, or two with the same text."""
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise NotImportable("the file has no tokens (tokenizer.ggml.tokens)")
    if len(set(tokens)) < len(tokens):
        raise NotImportable("a token is there twice (tokenizer.ggml.tokens)")
    return tokens


def _added_token(text: str) -> AddedToken:
    """Make a token that is recognised as a whole wherever it occurs in a text."""
    return AddedToken(text, normalized=False)


def _tokenizer(values: Values, tokens: list[str]) -> Tokenizer:
    """Make the tokenizer without its added tokens. Raises NotImportable if its kind is not known or
    a part of it is missing."""
    kind = values.text("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(values, tokens)
    if kind == "llama":
        return _sentence_piece(values, tokens)
    raise NotImportable(f"its tokenizer is {kind!r}; known are gpt2 (byte-level) and llama")


def _byte_level(values: Values, tokens: list[str]) -> Tokenizer:
    """Make the tokenizer of a model with byte-level BPE, without its added tokens.

    Raises NotImportable if its rule for words is not known, or the file has no valid merges.
    """
    rule = _known_rule(values)
    merges = values.get("tokenizer.ggml.merges")
    if not merges:
        raise NotImportable("the file has no merges (tokenizer.ggml.merges)")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [_tokens_of_merge(merge, vocab) for merge in merges]
    # Llama 3 takes a word that is in the vocabulary as one token, without merges.
    bpe = models.BPE(vocab, pairs, ignore_merges=rule == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    if rule in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _known_rule(values: Values) -> str:
    """Return the name of the rule that cuts text into words, such as "qwen2". Raises NotImportable
    if the file names no rule, or one that is not in PRE_TOKENIZERS."""
    rule = values.text("tokenizer.ggml.pre", default="")
    if rule not in PRE_TOKENIZERS:
        raise NotImportable(
            f"it cuts words by the rule {rule or 'that it does not name'!r}; known are "
            + ", ".join(PRE_TOKENIZERS)
        )
    return rule


def _tokens_of_merge(merge: str, vocab: dict[str, int]) -> tuple[str, str]:
    """Split a merge rule such as "th e" into its two tokens.

    Raises NotImportable if one of them, or the token that they make together, is not in `vocab`.
    """
    first_token, space, second_token = merge.partition(" ")
    if not space:
        raise NotImportable(f"{merge!r} is no merge (tokenizer.ggml.merges)")
    for token in (first_token, second_token, first_token + second_token):
        if token not in vocab:
            raise NotImportable(f"the merge {merge!r} makes {token!r}, which is no token")
    return first_token, second_token


def _sentence_piece(values: Values, tokens: list[str]) -> Tokenizer:
    """Make the tokenizer of a model with SentencePiece's BPE, such as Llama 2 or Mistral, without
    its added tokens. Characters without a token are written as tokens of bytes.

    Raises NotImportable if the tokens have no scores.
    """
    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise NotImportable("the tokens have no scores (tokenizer.ggml.scores)")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # 0: the id that SentencePiece gives the token for unknown characters.
    unknown = tokens[int(values.number("tokenizer.ggml.unknown_token_id", default=0))]
    bpe = models.BPE(
        vocab, _merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    _write_spaces_as_words(tokenizer, values)
    return tokenizer


def _write_spaces_as_words(tokenizer: Tokenizer, values: Values) -> None:
    """Make the tokenizer write WORD_START for each space, and one more before the text unless the
    file forbids it. Its decoder turns these back into spaces and drops the one before the text."""
    to_tokens: list[Any] = [normalizers.Replace(" ", WORD_START)]
    to_text: list[Any] = [
        decoders.Replace(WORD_START, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if values.get("tokenizer.ggml.add_space_prefix") is not False:  # the default is to add one
        to_tokens.insert(0, normalizers.Prepend(WORD_START))
        to_text.append(decoders.Strip(" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(to_tokens)
    tokenizer.decoder = decoders.Sequence(to_text)


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Restore the merges, which SentencePiece stores only as scores of tokens.

    Every way to make a token of two others is a merge. Merges are sorted by the new token's score,
    highest first, and then by the ids of the two.
    """
    ranked: list[tuple[float, int, int, str, str]] = []  # what to sort by, then the merge
    for token, token_id in vocab.items():
        for left, right in _splits_in_two(token):
            if left in vocab and right in vocab:
                ranked.append((-scores[token_id], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _splits_in_two(token: str) -> Iterator[tuple[str, str]]:
    """Yield every way to cut a token into two non-empty texts, such as ("a", "bc") and ("ab",
    "c")."""
    return ((token[:cut], token[cut:]) for cut in range(1, len(token)))
