"""The tokenizer of a GGUF file cuts text as the one it was made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Words
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.models.gguf import importer

pytestmark = pytest.mark.timeout(60)

CORPUS = [
    "The year 2024 had 366 days, 12 months; 1,234,567 people said: it's we'll they've I'M.",
    "def add(a, b):\n    return a + b  # sums\n\n\tprint(add(12, 345))\r\n",
    "Zoë naïve façade Москва 東京 서울 ١٢٣ ½ ﬁ e\u0301 😀👍🏽 \u200b x\u00a0y",
    '{"name": "Ada", "born": 1815, "items": [1, 2, 3]}',
] * 4
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "   two  spaces   ",
    "\n\n\n",
    "007 3.14159 1000000",
    "it'S IT'LL don't",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}</tool_call>",
    "<|im_start|><|im_end|> <|im_end|>x",
    "caf\u00e9 cafe\u0301 \u1e9b\u0323",  # two forms of the same
    "a\u2581b",
]
SPECIAL = ["<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>"]
DIGITS_ALONE = pre_tokenizers.Digits(individual_digits=True)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def cut_like_llama_3() -> pre_tokenizers.PreTokenizer:
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated"), bytes_alone]
    )


def learned(cut: pre_tokenizers.PreTokenizer, *, whole_words: bool = False) -> Tokenizer:
    """A byte-level tokenizer that learned 120 merges of the corpus."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 120,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def qwen2() -> Any:
    """transformers' own tokenizer of Qwen2."""
    from transformers import Qwen2Tokenizer

    state = json.loads(learned(cut_like_llama_3()).to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    return Qwen2Tokenizer(vocab=state["vocab"], merges=merges)._tokenizer


ORIGINALS: dict[str, Callable[[], Tokenizer]] = {
    "qwen2": qwen2,
    "llama-bpe": lambda: learned(cut_like_llama_3(), whole_words=True),
    "smollm": lambda: learned(pre_tokenizers.Sequence([DIGITS_ALONE, GPT2])),
    "gpt-2": lambda: learned(GPT2),
}


def imported(folder: Path, words: Words) -> Tokenizer:
    config = gguf_files.config(vocab_size=len(words.tokens))
    file = gguf_files.write_random(folder / "x.gguf", facts=config, words=words)
    importer.import_gguf(file, folder / "out")
    return Tokenizer.from_file(str(folder / "out" / "tokenizer.json"))


def byte_level(folder: Path, rule: str) -> tuple[Tokenizer, Tokenizer]:
    """The original, with two special and two added tokens, and what was imported of its file."""
    original = ORIGINALS[rule]()
    from tokenizers import AddedToken

    original.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    original.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    tokens = [str(original.id_to_token(i)) for i in range(original.get_vocab_size())]
    types = [
        CONTROL if token in SPECIAL else USER_DEFINED if token in ADDED else NORMAL
        for token in tokens
    ]
    end = tokens.index("<|im_end|>")
    return original, imported(folder, Words(tokens, types, merges, rule=rule, end=end))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("rule", list(ORIGINALS))
def test_a_byte_level_tokenizer_cuts_every_text_as_its_original(tmp_path: Path, rule: str):
    original, copy = byte_level(tmp_path, rule)
    for text in TEXTS:
        assert ids(copy, text) == ids(original, text), text
        for shown in (True, False):
            found = copy.decode(ids(copy, text), skip_special_tokens=shown)
            assert found == original.decode(ids(original, text), skip_special_tokens=shown)

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=60))
    def any_text(text: str):
        assert ids(copy, text) == ids(original, text)

    any_text()


def test_the_rules_differ_so_a_wrong_one_would_be_seen(tmp_path: Path):
    cuts = {}
    for rule in ORIGINALS:
        (tmp_path / rule).mkdir()
        _, copy = byte_level(tmp_path / rule, rule)
        assert copy.pre_tokenizer is not None
        cuts[rule] = [part for part, _ in copy.pre_tokenizer.pre_tokenize_str("in 1234 days'S")]
    assert cuts["qwen2"] != cuts["llama-bpe"] != cuts["smollm"] != cuts["gpt-2"]
    assert "1234" not in cuts["smollm"] and "123" in cuts["llama-bpe"]


@pytest.fixture
def sentence_piece(tmp_path: Path) -> Tokenizer:
    """A tokenizer of the kind that Llama 2 and Mistral have."""
    pieces = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("ABCIT0123456789.,:'")
    joined = ["th", "the", "he", "in", "er", "an", "\u2581t", "\u2581the", "\u2581a", "\u2581th"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    # Scores fall with the order of learning, as SentencePiece stores them.
    learned_order = [*joined, "\u2581", *pieces]
    tokens += learned_order
    types += [NORMAL] * len(learned_order)
    scores = [0.0] * 259 + [-float(i) for i in range(len(learned_order))]
    words = Words(tokens, types, scores=scores, kind="llama", rule="default", end=2, begin=1)
    return imported(tmp_path, words)


def shown(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.encode(text, add_special_tokens=False).tokens


def test_sentencepiece_joins_by_score_and_falls_back_to_bytes(sentence_piece: Tokenizer):
    assert shown(sentence_piece, "the ant") == ["\u2581the", "\u2581", "an", "t"]
    assert shown(sentence_piece, "other") == ["\u2581", "o", "the", "r"]
    assert shown(sentence_piece, "12 é") == ["\u2581", "1", "2", "\u2581", "<0xC3>", "<0xA9>"]
    assert shown(sentence_piece, "a</s>") == ["\u2581a", "</s>"]
    assert shown(sentence_piece, "  a") == ["\u2581", "\u2581", "\u2581a"]


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_what_sentencepiece_cut_reads_as_before(tmp_path_factory, text: str):
    folder = tmp_path_factory.getbasetemp() / "sentence_piece"
    if not folder.exists():
        folder.mkdir()
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
        types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL]
        words = Words(tokens, types, scores=[0.0] * 260, kind="llama", end=2, begin=1)
        imported(folder, words)
    copy = Tokenizer.from_file(str(folder / "out" / "tokenizer.json"))
    if "\u2581" not in text and "<" not in text:
        assert copy.decode(ids(copy, text)) == text
