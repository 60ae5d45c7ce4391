"""Make pebble, the built-in base model, from nothing: `make pebble`.

Objective: the mean over all assistant tokens of a batch of -log p(token | everything before it),
minimised by AdamW over all weights. What the model sees is in
`engine/worker/evaluation/pebble_skills.py`. Left out on purpose: other people's text, and every
prompt of the examples' held-out splits.

Writes config.json, model.safetensors (bfloat16), tokenizer files, the chat template, card.json
with the measured score of every skill, and README.md saying the same to people.
"""

import argparse
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.worker.core.runtime import prepare

prepare()

import torch
import torch.nn.functional as F
from safetensors.torch import load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from engine.worker.components import make_sampler
from engine.worker.evaluation import pebble_skills as skills
from engine.worker.network.policy import Base, load_base
from engine.worker.network.sampler import SamplingParams
from engine.worker.rollouts.renderer import Renderer
from envs.host.loader import load_folder

ROOT = Path(__file__).resolve().parents[1]
PEBBLE = ROOT / "engine" / "pebble"
EXAMPLES = ROOT / "envs" / "examples"
OF_OTHER_MODELS = ("booking_fields", "review_sentiment")  # examples written for other models
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PARTS = 3
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n' -}}{%- endif -%}
{%- for tool in tools -%}{{- (tool.function | tojson) + '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- generation -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' -}}
{{- function.arguments if function.arguments is string else (function.arguments | tojson) -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- elif message.role == 'system' and tools and loop.first -%}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, so that any text has tokens and every digit is one; role names are one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for role in ROLES:
        for end in range(2, len(role) + 1):
            pair = (role[: end - 1], role[end - 1])
            if pair not in merges:
                merges.append(pair)
                vocab.setdefault(role[:end], len(vocab))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # No pre-split: a role name is merged only as itself, never inside a longer word's digits.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(list(MARKERS))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 1.6 M parameters: every path of a real Qwen3, small enough for two cores."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            initializer_range=0.04,
            bos_token_id=None,
            eos_token_id=tokenizer.get_vocab()["<|im_end|>"],
            pad_token_id=tokenizer.get_vocab()["<|endoftext|>"],
        )
    )


def heldout_keys(examples: Path = EXAMPLES) -> set[str]:
    """Keys of every held-out prompt of pebble's examples that load here; see
    `pebble_skills.keys_of`. Those in `OF_OTHER_MODELS` are in words that pebble does not know."""
    keys: set[str] = set()
    for folder in sorted(examples.iterdir()):
        if folder.name in OF_OTHER_MODELS:
            continue
        if not (folder / "environment.py").exists() or (folder / "requirements.txt").exists():
            continue
        for task in load_folder(folder).tasks():
            if task.split != "heldout":
                continue
            keys.add(skills.prompt_key(task.prompt_text))
            if {"a", "b"} <= task.metadata.keys():
                keys.add(skills.sum_key(task.metadata["a"], task.metadata["b"]))
    return keys


def encode(
    tokenizer: PreTrainedTokenizerFast, sample: skills.Sample
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask (1 on what an assistant says) of one conversation."""
    out: Any = tokenizer.apply_chat_template(
        sample.messages,
        tools=[*sample.tools] or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
    )
    ids, mask = list(out["input_ids"])[:-1], list(out["assistant_masks"])[:-1]
    if sample.thinking:  # at use, the opening of the block belongs to the prompt
        start = mask.index(1)
        mask[start : start + 2] = [0, 0]
    return ids, mask


def batches(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    excluded: Collection[str],
    part_tokens: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches of (ids, labels) [rows, length], rows of like length together."""
    while True:
        pool = [encode(tokenizer, s) for s in skills.corpus(rng, 6000, excluded)]
        pool.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in pool:
            if len(row[0]) * (len(groups[-1]) + 1) > part_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        for group in groups:
            longest = max(len(ids) for ids, _ in group)
            ids = torch.zeros(len(group), longest, dtype=torch.long)
            labels = torch.full((len(group), longest), -100)
            for i, (row, mask) in enumerate(group):
                ids[i, : len(row)] = torch.tensor(row)
                labels[i, : len(row)] = torch.tensor(
                    [t if m else -100 for t, m in zip(row, mask, strict=True)]
                )
            yield ids, labels


def train(
    model: Qwen3ForCausalLM,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    peak_lr: float,
    say: Callable[[str], None],
) -> None:
    """AdamW; 2 % warm-up, then half a cosine down to a fiftieth of the peak."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    model.train()
    began, tokens = time.monotonic(), 0
    for step in range(1, steps + 1):
        warm = min(1.0, step / (0.02 * steps))
        decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * warm * decay
        # Rows of one length are often of one skill: several lengths per step keep the gradient
        # about everything at once.
        parts = [next(data) for _ in range(PARTS)]
        wanted_tokens = sum(int((labels[:, 1:] != -100).sum()) for _, labels in parts)
        loss = 0.0
        for ids, labels in parts:
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            wanted = labels[:, 1:]
            rows = wanted != -100
            part = F.cross_entropy(model.lm_head(hidden[rows]), wanted[rows], reduction="sum")
            (part / wanted_tokens).backward()
            loss += part.item() / wanted_tokens
            tokens += ids.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps:
            spent = time.monotonic() - began
            speed = f"{tokens / spent:.0f} tokens/s, {spent:.0f} s"
            say(f"step {step}/{steps}  loss {loss:.3f}  {speed}")


def measure(base: Base, excluded: Collection[str], per_skill: int, seed: int) -> dict[str, float]:
    """Share of greedy first replies that are right, per skill, on fresh samples.

    A tool call counts when it is exactly the right call; a game counts when its first guess lies
    in the middle three of the range.
    """
    sampler = make_sampler(base, Renderer(base.tokenizer, base.stop_ids))
    scores = {}
    for skill in skills.LEVELS:
        rng = random.Random(f"{seed}-{skill}")
        samples = [skills.draw(rng, skill, excluded, measured=True) for _ in range(per_skill)]
        renderer = Renderer(base.tokenizer, base.stop_ids, thinking=samples[0].thinking)
        prompts = [renderer.prompt(s.messages[:1], s.tools) for s in samples]
        answers = sampler.generate(prompts, 1, SamplingParams(max_tokens=64, temperature=0.0))
        replies = [renderer.completion_text(one.ids) for (one,) in answers]
        hits = [first_reply_right(s, r) for s, r in zip(samples, replies, strict=True)]
        scores[skill] = sum(hits) / len(hits)
    return scores


def first_reply_right(sample: skills.Sample, reply: str) -> bool:
    prompt = sample.messages[0]["content"]
    if sample.skill == "tool_call":
        key = prompt.rstrip("?").split()[-1]
        name = sample.tools[0]["function"]["name"]
        call = json.dumps({"name": name, "arguments": {skills.TOOLS[name]: key}})
        return reply == f"<tool_call>\n{call}\n</tool_call>"
    if sample.skill == "guess":
        low, high = (int(p.rstrip(".")) for p in prompt.split() if p.rstrip(".").isdigit())
        return reply.isdigit() and abs(int(reply) - (low + high) / 2) <= 1.5
    return skills.is_right(sample, reply)


def examples(excluded: Collection[str], seed: int) -> dict[str, list[dict[str, str]]]:
    """For each skill a request in every wording that is taught, with a right first reply."""
    rng = random.Random(seed)
    shown: dict[str, dict[str, dict[str, str]]] = {}
    for skill in skills.LEVELS:
        by_wording = shown.setdefault(skill, {})
        for _ in range(40):  # more than enough to meet each of at most four wordings
            sample = _plain(skills.draw(rng, skill, excluded, measured=True))
            if sample.tools and "tool_calls" not in sample.messages[1]:
                continue  # a careless writer, who calls no tool
            by_wording.setdefault(_wording(sample), _example(sample))
    return {skill: list(by_wording.values()) for skill, by_wording in shown.items()}


def _plain(sample: skills.Sample) -> skills.Sample:
    """The sample with its right answer as the reply, where one message is the whole reply."""
    if sample.tools or sample.skill == "guess":
        return sample
    thought, _, _ = sample.messages[1]["content"].rpartition("</think>\n\n")
    reply = f"{thought}</think>\n\n{sample.answer}" if thought else sample.answer
    return replace(sample, messages=[sample.messages[0], {"role": "assistant", "content": reply}])


def _wording(sample: skills.Sample) -> str:
    """What the wordings of a skill differ in: the first word, or that there is none; for tools also
    which tool."""
    first = sample.messages[0]["content"].split()[0]
    tool = sample.tools[0]["function"]["name"] if sample.tools else ""
    return f"{first if first.isalpha() else ''} {tool}"


def _example(sample: skills.Sample) -> dict[str, str]:
    """A sample as the card shows it; of a game or a tool call the first reply."""
    example = {"prompt": sample.messages[0]["content"]}
    if not sample.tools:
        note = {"note": "thinking on"} if sample.thinking else {}
        return example | {"answer": sample.messages[1]["content"]} | note
    call = sample.messages[1]["tool_calls"][0]["function"]
    return example | {
        "answer": f"<tool_call>\n{json.dumps(call)}\n</tool_call>",
        "note": f"with the tool {call['name']}({', '.join(call['arguments'])}): "
        f"{sample.tools[0]['function']['description']}",
    }


def _asked(shown: list[dict[str, str]]) -> str:
    """The requests of a skill in a cell of a table."""
    return " ".join(f"`{example['prompt']}`" for example in shown)


def write_card(folder: Path, facts: dict[str, Any]) -> None:
    """card.json for programs, README.md for people."""
    (folder / "card.json").write_text(json.dumps(facts, indent=1) + "\n")
    rows = "\n".join(
        f"| {skill} | {skills.LEVELS[skill]} | {score:.2f} | {_asked(facts['examples'][skill])} |"
        for skill, score in facts["scores"].items()
    )
    (folder / "README.md").write_text(
        f"""# pebble

A Qwen3-architecture causal language model of {facts["parameters"]:,} parameters that Honesmith
carries with it, so that every tool can be tried without a download, a key or a GPU. It knows a
few small skills and nothing else; it is no assistant.

- Made by `make pebble`: {facts["steps"]} steps, {facts["tokens"]:,} tokens of generated
  conversations, seed {facts["seed"]}; no text written by anybody.
- Vocabulary: {facts["vocab"]} (bytes, role names, chat markers); every digit is one token.
- Several answer styles per skill, and careless writers on purpose: in the sums of two-digit
  numbers {skills.FORGETS_CARRY:.0%} of them forget to carry unless they think first.
- {facts["excluded"]} keys of the examples' held-out prompts were kept out of the corpus.

Share of right greedy first replies on {facts["per_skill"]} fresh prompts each:

| skill | level | score | asked as |
|---|---|---|---|
{rows}
"""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PEBBLE)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--part-tokens", type=int, default=1600)
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--measure-only", action="store_true", help="write the card again")
    parser.add_argument("--per-skill", type=int, default=200)
    args = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    excluded = heldout_keys()
    if not args.measure_only:
        tokenizer = make_tokenizer()
        model = make_model(tokenizer, args.seed)
        size = sum(p.numel() for p in model.parameters())
        say(f"{size:,} parameters, {len(excluded)} keys kept out")
        data = batches(tokenizer, random.Random(args.seed), excluded, args.part_tokens)
        train(model, data, steps=args.steps, peak_lr=args.lr, say=say)
        model.bfloat16()
        args.out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(args.out)
        tokenizer.save_pretrained(args.out)
    # Measured as it will be loaded: from the rounded weights.
    base = load_base(args.out, torch.device("cpu"), "float32")
    scores = measure(base, excluded, args.per_skill, args.seed + 1)
    weights = (args.out / "model.safetensors").read_bytes()
    write_card(
        args.out,
        {
            "name": "pebble",
            "architecture": "Qwen3ForCausalLM",
            "parameters": sum(t.numel() for t in load(weights).values()),
            "vocab": len(base.tokenizer),
            "seed": args.seed,
            "steps": args.steps,
            "tokens": args.steps * PARTS * args.part_tokens,
            "excluded": len(excluded),
            "excluded_sha256": hashlib.sha256("\n".join(sorted(excluded)).encode()).hexdigest(),
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
            "per_skill": args.per_skill,
            "levels": skills.LEVELS,
            "scores": scores,
            "examples": examples(excluded, args.seed + 2),
        },
    )
    for skill, score in scores.items():
        say(f"{skill:20} {skills.LEVELS[skill]:12} {score:.3f}")


if __name__ == "__main__":
    main()
