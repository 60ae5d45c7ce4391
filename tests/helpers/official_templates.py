"""The official chat templates that the wheel of trl carries, byte for byte.

`make setup` puts it into .venv/oracle without what it needs.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(sys.prefix) / "oracle" / "trl" / "chat_templates"
REASON = "no trl in .venv/oracle: make setup"

CHATML = ("<|im_end|>",)
# The tokens that end a turn, as each family's configuration names them.
STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>",),
    "deepseekv3": ("<｜end▁of▁sentence｜>",),
    "gemma": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma4_v2": ("<turn|>", "<|tool_response>"),
    "gemma4_v3": ("<turn|>", "<|tool_response>"),
    "gemma4_v4": ("<turn|>", "<|tool_response>"),
    "gemma4_v5": ("<turn|>", "<|tool_response>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "lfm2": CHATML,
    "lfm2_2_5": CHATML,
    "lfm2_2_5_v2": CHATML,
    "lfm2_v2": CHATML,
    "llama3": ("<|eot_id|>",),
    "llama3_1": ("<|eot_id|>", "<|eom_id|>"),
    "llama3_2": ("<|eot_id|>", "<|eom_id|>"),
    "muse_glimmer": ("<|eot|>",),
    "nemotron_3_5_lightning": CHATML,
    "nemotron_3_nano": CHATML,
    "nemotron_3_super": CHATML,
    "nemotron_3_ultra": CHATML,
    "phi3": ("<|end|>", "<|endoftext|>"),
    "phi3_5": ("<|end|>", "<|endoftext|>"),
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "qwen3_5_nothink": CHATML,
    "qwen3_5_think": CHATML,
    "qwen3_6": CHATML,
    "qwen3_8": CHATML,
    "qwen3_instruct_2507": CHATML,
}
# They read images, or do not write from left to right.
NO_TEXT = set("diffusion_gemma idefics3 lfm2_2_5_vl llava_next qwen2_5_vl qwen3_vl smolvlm".split())
# Templates that know no tools; their tools are written into the messages.
WITHOUT_TOOLS = set(
    "cohere cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 lfm2 llama3 phi3 phi3_5".split()
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = 600  # ids of a tokenizer made of texts, without the markers
MARKER = re.compile(r"<[|｜]?[\w▁/]+[|｜]?>")


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def tokenizer_of(name: str, template: str, texts: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with the markers of the family's template, and another template in it. It has one
    id per byte and one per marker; with `texts` also one per frequent piece of them."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=PIECES if texts else len(ALPHABET),
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    core.train_from_iterator((part for text in texts for part in MARKER.split(text)), trainer)
    found = MARKER.findall(source(name))
    markers = sorted({*found, *STOPS[name], "<bos>", "<|start|>", "<|end|>"})
    core.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token=STOPS[name][0],
        chat_template=template,
    )
