"""Do exports of a run answer as the run does, in readers that are not ours?

    .venv/bin/python -m benchmarks.exports RUN [--home DIR] [--out FOLDER] [--only peft,gguf-f16]

Asks `--prompts` held-out tasks of the run's environment greedily: first base and adapter on our own
sampler, then the exported adapter in peft, the merged model in transformers, and both GGUF files in
llama.cpp (the package xllamacpp, with the chat template of the file). Prints for each reader how
many answers are equal, and for each other one how close the two tokens were at the first
difference: the gap of their log-probabilities in our own model, 0 for a tie.

The answers of each reader are kept in the folder `--out` as they come; what is there is not asked
again. Exits 1 where a reader other than gguf-q8_0 differs by more than near-ties.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.worker.core.runtime import prepare

prepare()

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.core.files import read_json, write_json
from engine.environments.registry import find_env, read_tasks
from engine.home.run_dir import Home
from engine.models import catalog
from engine.serving.export import export
from engine.worker.network.sampler import SamplingParams
from engine.worker.serving.own_models import OwnModels
from envs.json_types import ChatMessage

FILES = {
    "peft": "adapter",
    "transformers": "merged",
    "gguf-f16": "gguf-f16",
    "gguf-q8_0": "gguf-q8_0",
}
NEAR_TIE = 0.05  # of log-probability: the other token was within 5 % as likely
Prompt = list[ChatMessage]


@dataclass(frozen=True)
class Difference:
    """Where an answer left that of the run: `gap` is how much likelier the run's token was, as a
    difference of log-probabilities in our own model."""

    prompt: int
    token: int
    ours: str
    theirs: str
    gap: float


def main() -> int:
    options = parse()
    home = Home.locate(options.home or None)
    ref = options.run if "@" in options.run else f"{options.run}@best"
    model = catalog.resolve_model(home, ref)
    out = Path(options.out or home.cache / "export-readers" / ref.replace("@", "-"))
    out.mkdir(parents=True, exist_ok=True)
    config = home.run(model.run_id).read_config()
    tasks = read_tasks(find_env(home, config.env_id), "heldout")[: options.prompts]
    prompts = [task["prompt"] for task in tasks]
    own = OwnModels(model.base_path, "base", "cpu", thinking=False)
    own.add("tuned", Path(str(model.adapter)))
    ours = kept(out / "own.json", prompts, lambda asked: own_answers(own, asked, options.tokens))
    readers = options.only.split(",") if options.only else list(FILES)
    is_alike = True
    for reader in readers:
        folder = exported(home, ref, FILES[reader], out)
        theirs = kept(
            out / f"{reader}.json",
            prompts,
            lambda asked, reader=reader, folder=folder: answers_of(
                reader, folder, model.base_path, asked, options.tokens
            ),
        )
        differences = compared(own, prompts, ours, theirs)
        equal = len(prompts) - len(differences)
        near = sum(each.gap <= NEAR_TIE for each in differences)
        print(f"{reader}: {equal} of {len(prompts)} equal, {near} of the others near-ties")
        for each in differences:
            print("  " + json.dumps(asdict(each), ensure_ascii=False))
        is_alike = is_alike and (reader == "gguf-q8_0" or equal + near == len(prompts))
    own.close()
    return 0 if is_alike else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--home", default="")
    parser.add_argument("--out", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    return parser.parse_args()


def kept(
    file: Path, prompts: Sequence[Prompt], ask: Callable[[Sequence[Prompt]], Iterable[str]]
) -> list[str]:
    """The answers to `prompts` in `file`; `ask` gives those that are missing, which are added."""
    answers: list[str] = read_json(file) if file.exists() else []
    missing = prompts[len(answers) :]
    for answer in ask(missing) if missing else ():
        answers.append(answer)
        write_json(file, answers)
    return answers


def exported(home: Home, ref: str, export_format: str, out: Path) -> Path:
    """The folder of that export; waits until it is there."""
    while True:
        reply = export(home, ref, export_format, str(out / export_format))
        if reply["state"] == "exported":
            return Path(reply["path"])


def own_answers(own: OwnModels, prompts: Sequence[Prompt], tokens: int) -> list[str]:
    ids = [own.renderer.prompt(prompt) for prompt in prompts]
    with own.speaking_as("tuned") as sampler:
        completions = sampler.generate(ids, 1, SamplingParams(tokens, temperature=0.0))
    return [own.renderer.completion_text(each.ids) for (each,) in completions]


def answers_of(
    reader: str, folder: Path, base: Path, prompts: Sequence[Prompt], tokens: int
) -> Iterator[str]:
    if reader.startswith("gguf"):
        return llama_cpp_answers(next(folder.glob("*.gguf")), prompts, tokens)
    if reader == "transformers":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return transformers_answers(model, folder, prompts, tokens)
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return transformers_answers(PeftModel.from_pretrained(loaded, folder), base, prompts, tokens)


def transformers_answers(
    model: PreTrainedModel | PeftModel, tokenizer_folder: Path, prompts: Sequence[Prompt], most: int
) -> Iterator[str]:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model.eval()
    for prompt in prompts:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            sampled = model.generate(input_ids=ids, max_new_tokens=most, do_sample=False)
        yield tokenizer.decode(sampled[0, ids.shape[1] :], skip_special_tokens=True)


def llama_cpp_answers(file: Path, prompts: Sequence[Prompt], tokens: int) -> Iterator[str]:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.warmup = 1024, False
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    for prompt in prompts:
        asked = {"messages": prompt, "temperature": 0, "max_tokens": tokens}
        reply = server.handle_chat_completions(asked)
        yield reply["choices"][0]["message"]["content"]


def compared(
    own: OwnModels, prompts: Sequence[Prompt], ours: Sequence[str], theirs: Sequence[str]
) -> list[Difference]:
    """The answers that differ, spaces at their ends aside."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [
        first_difference(own, number, prompts[number], mine, other)
        for number, (mine, other) in pairs
        if mine.strip() != other.strip()
    ]


def first_difference(
    own: OwnModels, number: int, prompt: Prompt, mine: str, other: str
) -> Difference:
    """Where the two answers part, and how close their tokens were there."""
    ids = own.renderer.prompt(prompt)
    end = min(own.renderer.stop_ids)  # an answer that is the beginning of the other ends there
    my_ids = [*own.renderer.encode(mine), end]
    other_ids = [*own.renderer.encode(other), end]
    together = zip(my_ids, other_ids, strict=False)
    place = next(index for index, (left, right) in enumerate(together) if left != right)
    with own.speaking_as("tuned"):
        logits = own.base.network.logits([*ids, *my_ids[:place]], own._loaded["tuned"])
    logprobs = torch.log_softmax(logits[-1].float(), dim=-1)
    gap = float(logprobs[my_ids[place]] - logprobs[other_ids[place]])
    texts = [own.renderer.completion_text([each[place]]) for each in (my_ids, other_ids)]
    return Difference(number, place, *texts, gap=round(gap, 4))


if __name__ == "__main__":
    sys.exit(main())
