"""The tokenizer of a model folder under GGUF's keys.

GGUF names the rule that cuts words; it is found by comparing the tokenizer's own rule with those of
`tokenizer.PRE_TOKENIZERS`. A tokenizer with another rule is refused: a reader of the file would
read other tokens than the model was trained on.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, models

from engine.core.files import JsonObject
from engine.models import model_files
from engine.models.gguf.tokenizer import NORMALIZED, PRE_TOKENIZERS

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of token


class NotExportable(ValueError):
    """A model that cannot be written as GGUF; the text says why."""


def read(folder: Path, rows: int) -> JsonObject:
    """The tokenizer and the chat template of the model in `folder`, by GGUF's keys.

    `rows`: of the embedding; ids without a token get a placeholder. Raises NotExportable if its
    rule has no name in GGUF, UserError MODEL_UNSUPPORTED if a file cannot be read.
    """
    state = model_files.load_json(folder / "tokenizer.json")
    model = state.get("model") or {}
    if model.get("type") != "BPE":
        raise NotExportable(f"its tokenizer is {model.get('type')}, not BPE")
    added = {entry["id"]: entry for entry in state.get("added_tokens") or []}
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: entry["content"] for number, entry in added.items()}
    if max(texts) >= rows:
        raise NotExportable(f"its tokenizer has the id {max(texts)}, its embedding {rows} rows")
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(rows)]
    types = [_type_of(number, texts, added) for number in range(rows)]
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    found: JsonObject = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.add_bos_token": False,  # the chat template writes it
        "tokenizer.chat_template": model_files.chat_template(folder),
    }
    if model.get("byte_fallback"):
        found |= _sentence_piece(state, tokens, merges)
        types = [
            _BYTE if _is_byte(token) else kind for token, kind in zip(tokens, types, strict=True)
        ]
    else:
        found["tokenizer.ggml.model"] = "gpt2"
        found["tokenizer.ggml.pre"] = _rule(state)
        found["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    found["tokenizer.ggml.token_type"] = types
    return found | _special(folder, {text: number for number, text in texts.items()})


def _type_of(number: int, texts: dict[int, str], added: dict[int, JsonObject]) -> int:
    """GGUF's type of a token."""
    if number not in texts:
        return _UNUSED
    if number not in added:
        return _NORMAL
    if texts[number] == "<unk>":
        return _UNKNOWN
    return _CONTROL if added[number].get("special") else _USER_DEFINED


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _sentence_piece(state: JsonObject, tokens: list[str], merges: list[list[str]]) -> JsonObject:
    """Scores in place of merges: the earlier a token is made, the higher. Raises NotExportable if
    text is prepared in another way than Llama 2 does."""
    normalizer = state.get("normalizer") or {}
    steps = normalizer.get("normalizers") or [normalizer]
    kinds = [step.get("type") for step in steps]
    if kinds not in (["Prepend", "Replace"], ["Replace"]):
        raise NotExportable(f"its tokenizer prepares text by {kinds}")
    order: dict[str, int] = {}
    for left, right in merges:
        order.setdefault(left + right, len(order))
    last = len(order)
    scores = [-float(order.get(token, last)) for token in tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": kinds[0] == "Prepend",
    }


def _rule(state: JsonObject) -> str:
    """GGUF's name of the rule that cuts words. Raises NotExportable if it has none."""
    ignores_merges = bool(state["model"].get("ignore_merges"))
    normalizer = (state.get("normalizer") or {}).get("type")
    for name, make in PRE_TOKENIZERS.items():
        example = Tokenizer(models.BPE())
        example.pre_tokenizer = make()
        known = json.loads(example.to_str())["pre_tokenizer"]
        if (
            _essence(known) == _essence(state.get("pre_tokenizer"))
            and ignores_merges == (name == "llama-bpe")
            and normalizer == ("NFC" if name in NORMALIZED else None)
        ):
            return name
    raise NotExportable("GGUF has no name for the rule by which its tokenizer cuts words")


def _essence(rule: object) -> object:
    """A rule without what does not change the ids of tokens."""
    if isinstance(rule, list):
        return [_essence(each) for each in rule]
    if isinstance(rule, dict):
        kept = {key: _essence(value) for key, value in rule.items() if key != "trim_offsets"}
        if kept.get("type") == "ByteLevel":
            kept.setdefault("use_regex", True)
        return kept
    return rule


def _special(folder: Path, ids: dict[str, int]) -> JsonObject:
    """Ids of the tokens that begin, end and fill."""
    settings = model_files.load_json(folder / "tokenizer_config.json")
    found: JsonObject = {}
    for key, name in (
        ("bos_token_id", "bos_token"),
        ("eos_token_id", "eos_token"),
        ("unknown_token_id", "unk_token"),
        ("padding_token_id", "pad_token"),
    ):
        given = settings.get(name)
        text = given.get("content") if isinstance(given, dict) else given
        if isinstance(text, str) and text in ids:
            found[f"tokenizer.ggml.{key}"] = ids[text]
    ends = _end_ids(folder)
    if ends:
        found.setdefault("tokenizer.ggml.eos_token_id", ends[0])
        others = [end for end in ends if end != found["tokenizer.ggml.eos_token_id"]]
        if others:
            found["tokenizer.ggml.eot_token_id"] = others[0]
    if "tokenizer.ggml.eos_token_id" not in found:
        raise NotExportable("its tokenizer names no end token")
    return found


def _end_ids(folder: Path) -> list[int]:
    """The ids that end an answer, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            given = model_files.load_json(folder / name).get("eos_token_id")
            ends = given if isinstance(given, list) else [given]
            if ends := [end for end in ends if isinstance(end, int)]:
                return ends
    return []
