"""Makes everything the comparisons need, from seeds alone: models, tokenizers, rows, environments.

    python -m benchmarks.inputs FOLDER [CASE ...]

Text is words of a few syllables, drawn as in natural text (a few words often, most rarely), in
conversations whose lengths are log-normal: median 40 words for prompts and answers, sigma 0.9, cut
where a conversation would pass the case's `max_length`. GRPO prompts are about 80 or 260 tokens.
Both sides get the same token ids in the same order: the order is asked of the worker's own loops.
"""

import json
import math
import random
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, GPU_CASES, REAL_CASES, SELF_TEST, SHAPES, Case, Shape
from engine.home.run_dir import Home
from engine.models import library

TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first -%}{{- '\\n' -}}{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '\\n<|im_start|>assistant\\n' -}}{%- endif -%}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHORTEST_ANSWER = 24  # tokens an answer keeps when its prompt is long
HELDOUT = 4

# The reward both sides pay: the same function of the text, differing within nearly every group.
ENVIRONMENT = '''
"""Prompts of one benchmark case; pays the share of characters with an even code point."""

from pathlib import Path

from envs import Score, Task
from envs.dataset import DatasetEnv


def pay(text: str) -> float:
    return sum(1 for letter in text if ord(letter) % 2 == 0) / max(1, len(text))


class Prompts(DatasetEnv):
    def score(self, task: Task, completion: str) -> Score:
        reward = pay(completion)
        return Score(reward, success=reward > 0.5)


def load_environment() -> Prompts:
    return Prompts(Path(__file__).parent / "prompts.jsonl")
'''


def words(seed: int = 0, count: int = 900) -> list[str]:
    """A vocabulary of made-up words."""
    rng = random.Random(f"words-{seed}")
    onset, vowel, coda = "b d f g k l m n p r s t v z".split(), "aeiou", ["", "n", "r", "l", "st"]

    def syllable() -> str:
        return rng.choice(onset) + rng.choice(vowel) + rng.choice(coda)

    words: set[str] = set()
    while len(words) < count:
        words.add("".join(syllable() for _ in range(rng.randint(1, 3))))
    return sorted(words)


def text(rng: random.Random, vocabulary: list[str], count: int) -> str:
    """`count` words, the n-th of the vocabulary about 1/n as often as the first; some numbers."""
    out = []
    for _ in range(count):
        if rng.random() < 0.1:
            out.append(str(rng.randint(0, 999)))
        else:
            rank = int(math.exp(rng.random() * math.log(len(vocabulary)))) - 1
            out.append(vocabulary[rank])
    return " ".join(out)


def lognormal(rng: random.Random, median: float, sigma: float, low: int, high: int) -> int:
    return max(low, min(high, int(rng.lognormvariate(math.log(median), sigma))))


def known_model(name: str, folder: Path) -> Any:
    """Fetch a model by its name into `folder`, as a user does; returns its tokenizer."""
    from transformers import AutoTokenizer

    home = Home.locate(folder.parent / "home")
    library.add(home, name)
    shutil.copytree(home.models / name, folder, dirs_exist_ok=True)
    return AutoTokenizer.from_pretrained(folder)


def words_of(tokenizer: Any, count: int = 900) -> list[str]:
    """A vocabulary of words that a real model's tokenizer has as one token each."""
    known = (tokenizer.decode([number]) for number in range(len(tokenizer)))
    every = {word[1:] for word in known if re.fullmatch(" [a-z]{3,}", word)}
    return random.Random("words").sample(sorted(every), count)


def make_tokenizer(size: int, folder: Path) -> Any:
    """A byte-level BPE of exactly `size` tokens, saved with its template.

    What the made-up text yields no merges for is filled with tokens that never occur, so a large
    vocabulary costs what it costs (the head) and changes no token count.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng, vocabulary = random.Random("corpus"), words()
    corpus = [text(rng, vocabulary, rng.randint(5, 60)) + "\n" for _ in range(1500)]
    corpus += ["user assistant system\n"] * 20
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(size, 2048),
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    raw.train_from_iterator(corpus, trainer)
    state = json.loads(raw.to_str())
    vocab = state["model"]["vocab"]
    for number in range(len(vocab), size):
        vocab[f"~unused-{number}~"] = number
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(shape: Shape, tokenizer: Any, folder: Path, dtype: str = "float32") -> None:
    """Random weights of `shape`, saved as transformers saves a model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        attention_bias=False,
        rms_norm_eps=1e-6,
        initializer_range=0.05 if shape.hidden < 1024 else 0.02,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("cuda" if dtype != "float32" and torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)


def make_rows(case: Case, tokenizer: Any) -> list[dict[str, Any]]:
    """Conversations (SFT) or prompts (GRPO) of one case, held-out ones first."""
    rng = random.Random(f"{case.name}-{case.seed}")
    vocabulary = words_of(tokenizer) if SHAPES[case.shape].known else words()
    rows = []
    for number in range(case.rows + HELDOUT):
        if case.algorithm == "sft":
            row = conversation(case, rng, vocabulary, tokenizer)
        else:
            # The longest prompt leaves room for the completion.
            length = lognormal(rng, case.words, 0.5, 8, 5 * case.words)
            row = {"prompt": text(rng, vocabulary, length)}
        split = "heldout" if number < HELDOUT else "train"
        rows.append({"id": f"row-{number}", "split": split, **row})
    return rows


def conversation(
    case: Case, rng: random.Random, vocabulary: list[str], tokenizer: Any
) -> dict[str, Any]:
    """One prompt and answer that fit into max_length together."""
    asked = text(rng, vocabulary, lognormal(rng, case.words, 0.9, 3, 8 * case.words)).split(" ")
    words = text(rng, vocabulary, lognormal(rng, case.words, 0.9, 3, 8 * case.words)).split(" ")
    while True:
        messages = [
            {"role": "user", "content": " ".join(asked)},
            {"role": "assistant", "content": " ".join(words)},
        ]
        prompt, whole = token_counts(tokenizer, messages)
        over = whole - case.max_length
        if over <= 0:
            return {"messages": messages}
        drop = max(1, over // 4)  # a word is at most a few tokens
        if whole - prompt > SHORTEST_ANSWER + drop and len(words) > drop:
            words = words[:-drop]
        else:
            asked = asked[:-drop]


def token_counts(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[int, int]:
    """(prompt, whole) tokens of a conversation, rendered by the template."""

    def size(part: list[dict[str, str]], opens: bool) -> int:
        ids = tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=opens)
        return len(tokenizer.encode(ids, add_special_tokens=False))

    return size(messages[:1], True), size(messages, False)


def write_environment(case: Case, rows: list[dict[str, Any]], folder: Path) -> None:
    """The folder a user would push: a dataset for SFT, an environment with a reward for GRPO."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if case.algorithm == "sft":
        (folder / "datasets").mkdir(exist_ok=True)
        (folder / "datasets" / "rows.jsonl").write_text(lines)
    else:
        (folder / "prompts.jsonl").write_text(lines)
        (folder / "environment.py").write_text(ENVIRONMENT)


def order(case: Case, count: int) -> list[int]:
    """Which train rows each step of an epoch takes, as the worker's loop says."""
    if case.algorithm == "sft":
        from engine.worker.sft import rows_of_step

        chosen = rows_of_step
    else:
        from engine.worker.rollouts.task_order import shuffled_tasks

        chosen = shuffled_tasks
    return [
        i
        for step in range(1, count // case.prompts + 1)
        for i in chosen(step, count, case.prompts, case.seed)
    ]


def make(folder: Path, wanted: Iterable[Case], dtype: str = "float32") -> None:
    """Everything for these cases into `folder`; a model that is complete is left as it is."""
    from transformers import AutoTokenizer

    for case in wanted:
        target = folder / "models" / case.shape
        if not (target / "model_done").is_file():
            shape = SHAPES[case.shape]
            if shape.known:
                known_model(shape.known, target)
            else:
                make_model(shape, make_tokenizer(shape.vocab, target), target, dtype)
            (target / "model_done").touch()
        make_case(case, AutoTokenizer.from_pretrained(target), folder / "cases" / case.name)


def make_case(case: Case, tokenizer: Any, folder: Path) -> None:
    """Rows, environment and `facts.json`: the rows in the order they are trained on, with their
    sizes in tokens. Sampling alone has no rows."""
    if case.algorithm == "decode":
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "facts.json").write_text(json.dumps({"case": case.name, "rows": []}))
        return
    rows = make_rows(case, tokenizer)
    write_environment(case, rows, folder / "environment")
    train = [row for row in rows if row["split"] == "train"]
    ordered = []
    for index in order(case, len(train)):
        row = train[index]
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        if case.algorithm == "sft" and SHAPES[case.shape].known:
            ordered.append(rendered(messages, tokenizer))
            continue
        if case.algorithm == "sft":
            prompt, whole = token_counts(tokenizer, messages)
        else:
            prompt = whole = token_counts(tokenizer, messages)[0]
        ordered.append({"messages": messages, "prompt_tokens": prompt, "tokens": whole})
    facts = {"case": case.name, "rows": ordered}
    (folder / "facts.json").write_text(json.dumps(facts))


def rendered(messages: list[dict[str, str]], tokenizer: Any) -> dict[str, Any]:
    """A conversation as the worker trains it, in token ids and a mask: a real model's template may
    write after the last turn, which only one side would learn."""
    from engine.worker.rollouts.renderer import Renderer

    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    row = renderer.rows(messages, (), "assistant")[0]
    prompt = len(row.ids) - sum(row.loss_mask)
    sizes = {"prompt_tokens": prompt, "tokens": len(row.ids)}
    return {"ids": row.ids, "loss_mask": row.loss_mask, **sizes}


if __name__ == "__main__":
    names = sys.argv[2:]
    if names and names[0] in GPU_CASES:
        make(Path(sys.argv[1]), [GPU_CASES[name] for name in names], "bfloat16")
    elif names:
        make(Path(sys.argv[1]), [(REAL_CASES | SELF_TEST)[name] for name in names])
    else:
        make(Path(sys.argv[1]), CASES.values())
