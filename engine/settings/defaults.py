"""How each setting left out is chosen, and which settings cannot stand together.

Sources of the figures: "LoRA without regret" (thinkingmachines.ai/blog/lora) for adapters on all
linear layers, alpha 32 whatever the rank, about ten times the learning rate of full fine-tuning
and small batches; DAPO (arXiv 2503.14476) for the token-mean loss and the wider upper clip; GSPO
(arXiv 2507.18071) for its narrow clips.
"""

import math
from dataclasses import dataclass
from typing import Any

from engine.core.errors import UserError
from engine.core.hardware import Hardware
from engine.environments.env_facts import EnvFacts
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.records.settings import PROJECTIONS, GivenSettings

USER, RECIPE, MODEL, HARDWARE, PARENT = "user", "recipe", "model", "hardware", "parent run"
EVAL_ROWS = 400
_CLIPS = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
_LONGEST_DEFAULT = 8192  # longer contexts are used when asked for


@dataclass(frozen=True)
class Facts:
    """What defaults are chosen from."""

    model: ModelFacts
    env: EnvFacts | None
    hardware: Hardware | None = None
    inherited: AdapterFacts | None = None
    attempts: int = 1
    vllm: bool = False

    def rows(self, algorithm: str) -> int | None:
        """Train rows the algorithm can use; None without an environment."""
        if self.env is None:
            return None
        return self.env.answered_rows if algorithm == "sft" else self.env.train_rows


@dataclass(frozen=True)
class SamplingLimits:
    """Tokens and turns an answer may take: of one turn, of an episode, of the whole sequence."""

    max_tokens: int
    max_turns: int
    max_length: int


class Filled:
    """Settings while they are being filled in: what the user gave stays."""

    def __init__(self, given: GivenSettings) -> None:
        self.values = dict(given)
        self.sources = dict.fromkeys(given, USER)
        self.warnings: list[str] = []

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def default(self, name: str, value: Any, source: str = RECIPE) -> None:
        if name not in self.values:
            self.values[name] = value
            self.sources[name] = source

    def at_most(self, name: str, most: int | None, why: str) -> None:
        """Cut a count given by the user to what there is, and say so."""
        if most is not None and name in self.values and self.values[name] > most:
            self.warnings.append(f"{name} = {self.values[name]} was cut to {most}: {why}.")
            self.values[name] = most


def fill(algorithm: str, given: GivenSettings, facts: Facts) -> Filled:
    """Every setting of `algorithm`, "evaluate" among them, with sources and warnings."""
    filling = Filled(given)
    if algorithm == "evaluate":
        _sampling(filling, facts)
        filling.default("temperature", 0.0 if facts.attempts == 1 else 1.0)
        filling.default("seed", 0)
        return filling
    _adapter(filling, facts)
    _machine(filling, facts)
    _data(filling, algorithm, facts)
    if algorithm == "sft":
        _sft(filling, facts)
    else:
        _grpo(filling, facts)
    _optimizer(filling, algorithm, facts)
    _rhythm(filling, algorithm, facts)
    return filling


def learning_rate(algorithm: str, hidden: int) -> float:
    """Peak learning rate of a LoRA for a model of this hidden size, two digits.

    SFT: ten times 5e-5, scaled by sqrt(2000 / hidden): 1.6e-3 at 192, 7e-4 at 1024, 3.5e-4 at
    4096. GRPO: 0.2 / hidden, which meets 1e-3 at 192 (measured to work) and 5e-5 at 4096.
    """
    value = 0.2 / hidden if algorithm == "grpo" else 5e-4 * math.sqrt(2000 / hidden)
    return float(f"{min(max(value, 1e-5), 2e-3):.1e}")


def _adapter(filling: Filled, facts: Facts) -> None:
    """Rank, scale and places of the adapter: those of the adapter it goes on from, else usual
    ones."""
    inherited = facts.inherited
    if inherited is not None:
        for name, value in _inherited(inherited).items():
            filling.values[name] = value
            filling.sources[name] = PARENT
    filling.default("lora_rank", 16)
    filling.default("lora_alpha", 32)
    filling.default("lora_targets", list(PROJECTIONS))
    filling.default("lora_dropout", 0.0)
    if filling["lora_rank"] > facts.model.hidden:
        filling.warnings.append(
            f"lora_rank = {filling['lora_rank']} is above the model's width of "
            f"{facts.model.hidden}: more rank than a full update has."
        )


def _inherited(adapter: AdapterFacts) -> GivenSettings:
    """The settings that a run continuing `adapter` takes from it."""
    return {
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_targets": list(adapter.targets),
    }


def _machine(filling: Filled, facts: Facts) -> None:
    gpu = facts.hardware.device if facts.hardware else None
    if gpu is not None and gpu.kind != "cuda":
        gpu = None
    filling.default("quantization", "none")
    if filling.values.get("precision") in (None, "auto"):
        half = filling["quantization"] == "nf4" or (gpu is not None and gpu.bf16)
        filling.values["precision"] = "bfloat16" if half else "float32"
        filling.sources["precision"] = HARDWARE
    large = gpu is not None and facts.model.weight_bytes > gpu.memory_total / 3
    filling.default("gradient_checkpointing", large, HARDWARE)


def _data(filling: Filled, algorithm: str, facts: Facts) -> None:
    rows = facts.rows(algorithm)
    filling.at_most("max_examples", rows, "the environment has no more train rows")
    filling.default("max_examples", rows)
    filling.default("seed", 0)
    filling.default("accept_reward_risk", False)
    filling.default("stop_early", "none")


def _sft(filling: Filled, facts: Facts) -> None:
    """Batch, epochs and steps, and the length of rows."""
    rows = filling["max_examples"]
    filling.default("batch_size", 32 if rows is None else min(32, max(1, rows // 8)))
    filling.default("loss_on", "assistant")
    filling.default("packing", True)
    if filling.values.get("steps") is None:
        filling.default("epochs", 3)
        per_epoch = math.ceil((rows or 1000) / filling["batch_size"])
        filling.default("steps", filling["epochs"] * per_epoch)
    else:
        filling.default("epochs", None)
    longest = facts.env.longest_total if facts.env else 0
    _length(filling, facts, longest or 2048)
    if filling["batch_size"] > 64:
        filling.warnings.append("Adapters learn worse from large batches; 32 rows are plenty.")


def _grpo(filling: Filled, facts: Facts) -> None:
    """Groups, sampling and loss."""
    rows = filling["max_examples"]
    filling.default("steps", 60)
    filling.default("prompts_per_step", 16 if rows is None else max(1, min(16, rows)))
    filling.default("group_size", 8)
    filling.default("temperature", 1.0)
    _sampling(filling, facts)
    filling.default("loss", "dapo")
    filling.default("advantage", "group_center" if filling["loss"] == "dr_grpo" else "group_norm")
    low, high = _CLIPS.get(filling["loss"], (0.2, 0.28))
    filling.default("clip_low", low)
    filling.default("clip_high", high)
    filling.default("kl_coef", 0.0)
    filling.default("tis_cap", 2.0)
    filling.default("updates_per_batch", 1)
    filling.default("max_reward_errors", 0.2)
    filling.default("resample_uniform", 0)
    filling.default("thinking_length_penalty", 0.0)
    filling.default("async_sampling", False)
    if filling.values.get("sampler") in (None, "auto"):
        # On a CPU vLLM answers with an adapter several times slower than our own sampler.
        gpu = facts.hardware is not None and facts.hardware.device.kind == "cuda"
        fits = filling["quantization"] == "none"  # vLLM would answer with the unrounded weights
        filling.values["sampler"] = "vllm" if gpu and facts.vllm and fits else "torch"
        filling.sources["sampler"] = HARDWARE
    if filling["async_sampling"] and filling["sampler"] == "torch":
        filling.warnings.append(
            "async_sampling = true with our own sampler shares one device between sampling and "
            "training: nothing is gained, and every batch is one update old."
        )
    if filling["top_p"] < 1:
        filling.warnings.append(
            "top_p below 1 samples from other probabilities than are trained; tis_cap corrects "
            "for a part of that only."
        )
    prompt = facts.env.longest_prompt if facts.env else 512
    _length(filling, facts, prompt + _episode(filling["max_turns"], filling["max_tokens"]))


def _sampling(filling: Filled, facts: Facts) -> None:
    """Settings shared by GRPO and evaluations, so that both ask a model in the same way."""
    filling.default("thinking", False)
    filling.default("top_p", 1.0)
    filling.default("stop", [])
    filling.default("max_turns", _turns(facts.env))
    context = min(filling.values.get("max_length") or math.inf, facts.model.max_positions)
    tokens = _within(int(context), facts.env, wanted := max_tokens(facts.env, filling["thinking"]))
    filling.default("max_tokens", tokens, MODEL if tokens < wanted else RECIPE)


def max_tokens(env: EnvFacts | None, thinking: bool) -> int:
    """Twice the longest reference turn, from 16 to 1024; 256 without one; room to think."""
    longest = env.longest_turn if env is not None else 0
    wanted = min(1024, max(16, 2 * longest)) if longest else 256
    return max(wanted, 1024) if thinking else wanted


def exam_limits(env: EnvFacts, context: int, max_length: int) -> SamplingLimits:
    """The limits of SFT's evaluations, whose settings name none.

    They are what GRPO and evaluate take by themselves: results can be compared, and an answer as
    long as the rows teach is not cut.
    """
    turns = _turns(env)
    tokens = _within(context, env, max_tokens(env, False))
    whole = env.longest_prompt + _episode(turns, tokens)
    return SamplingLimits(tokens, turns, min(context, max(max_length, whole)))


def _turns(env: EnvFacts | None) -> int:
    return 8 if env is not None and env.multi_turn else 1


def _within(context: int, env: EnvFacts | None, wanted: int) -> int:
    """`wanted` tokens, or as many as the longest prompt leaves of the context."""
    room = context - (env.longest_prompt if env else 0) - 1
    if room < 16:  # prompts alone nearly fill the context: most of them will be left out
        room = context // 2
    return max(1, min(wanted, room))


def _episode(turns: int, tokens: int) -> int:
    """Tokens after the prompt: the turns, and what the environment says between them."""
    return turns * tokens + (32 * turns if turns > 1 else 0)


def _length(filling: Filled, facts: Facts, wanted: int) -> None:
    """max_length: `wanted` rounded up to sixteen, within the model's context."""
    context = facts.model.max_positions
    most = min(context, _LONGEST_DEFAULT)
    rounded = max(32, math.ceil(wanted / 16) * 16)
    source = MODEL if rounded > most else RECIPE
    least = filling.values.get("max_tokens", 0) + 1
    filling.default("max_length", min(context, max(least, min(rounded, most))), source)


def _optimizer(filling: Filled, algorithm: str, facts: Facts) -> None:
    """Learning rate by the model's width, its schedule, clipping."""
    usual = learning_rate(algorithm, facts.model.hidden)
    filling.default("learning_rate", usual, MODEL)
    filling.default("lr_schedule", "cosine" if algorithm == "sft" else "constant")
    filling.default("warmup_ratio", 0.03 if algorithm == "sft" else 0.0)
    filling.default("weight_decay", 0.0)
    filling.default("max_grad_norm", 1.0)
    if filling["learning_rate"] > 10 * usual:
        filling.warnings.append(
            f"learning_rate = {filling['learning_rate']:g} is over ten times the "
            f"{usual:g} that suits this model."
        )


def _rhythm(filling: Filled, algorithm: str, facts: Facts) -> None:
    heldout = facts.env.heldout_rows if facts.env else None
    filling.at_most("eval_rows", heldout, "the environment has no more held-out rows")
    filling.default("eval_rows", EVAL_ROWS if heldout is None else min(EVAL_ROWS, heldout))
    parts = 5 if algorithm == "sft" else 3
    filling.default("eval_every", max(1, math.ceil(filling["steps"] / parts)))
    filling.default("save_every", filling["eval_every"])
    filling.default("keep_checkpoints", 3)


def check_env(algorithm: str, env: EnvFacts) -> None:
    """Refuse an environment the algorithm cannot learn from."""
    if env.train_rows == 0:
        problem, hint = "has no train rows", "Give rows with split = train."
    elif algorithm == "sft" and env.answered_rows == 0:
        problem = "has no reference answers to imitate"
        hint = 'Set `answer` on its tasks, or use algorithm="grpo".'
    elif algorithm == "grpo" and not env.scored:
        problem = "has no score, so there is nothing to reinforce"
        hint = 'Use algorithm="sft", or give the environment a `score` method.'
    else:
        return
    raise UserError("BAD_ARGUMENT", f"{env.env_id} {problem}", hint=hint, field="algorithm")


def check_turns(given: GivenSettings, env: EnvFacts) -> None:
    """max_turns belongs to multi-turn environments."""
    if "max_turns" in given and not env.multi_turn:
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"max_turns is for multi-turn environments; {env.env_id} has a single turn",
            hint="Leave max_turns out.",
            field="settings.max_turns",
        )


def check_sampling(given: GivenSettings, attempts: int) -> None:
    """One attempt is greedy, so nothing can shape its sampling; several must differ."""
    temperature = given.get("temperature")
    if attempts == 1:
        for name, neutral in (("temperature", 0), ("top_p", 1)):
            if given.get(name, neutral) != neutral:
                raise _refuse(
                    name,
                    f"{name} = {given[name]} with one attempt, which is greedy",
                    f"Leave {name} out, or ask for several attempts.",
                )
    elif temperature == 0:
        raise _refuse(
            "temperature",
            f"temperature = 0 makes all {attempts} attempts equal",
            "Leave temperature out, or ask for one attempt.",
        )


def check_loss(given: GivenSettings) -> None:
    """cispo clips the weight from above only."""
    if given.get("loss") == "cispo" and "clip_low" in given:
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            "clip_low does not apply to loss = cispo, which clips its weight from above only",
            hint="Leave clip_low out; clip_high is the limit.",
            field="settings.clip_low",
        )


def check_sampler(given: GivenSettings, vllm: bool) -> None:
    """vLLM samples only where it is set up."""
    if given.get("sampler") == "vllm" and not vllm:
        raise _refuse(
            "sampler",
            'sampler = "vllm", but vLLM is not set up on this machine',
            "Run `honesmith setup --vllm` once, or leave sampler out.",
        )


def check_inherited(given: GivenSettings, inherited: AdapterFacts) -> None:
    """A run that continues an adapter keeps its shape."""
    for name, have in _inherited(inherited).items():
        want = given.get(name)
        same = set(want) == set(have) if isinstance(want, list) else want == have
        if want is not None and not same:
            raise _refuse(
                name,
                f"{name} = {want} differs from the {have} of the run that is continued",
                f"Leave {name} out, or start from the base model.",
            )


def check_together(algorithm: str, filled: Filled, model: ModelFacts, env: EnvFacts | None) -> None:
    """Refuse values that each can stand but not together, with the model or with the rows."""
    values = filled.values
    length, tokens = values.get("max_length"), values.get("max_tokens")
    if length is not None and length > model.max_positions:
        raise _refuse(
            "max_length",
            f"max_length = {length} is above the model's context of {model.max_positions} tokens",
            f"Use at most {model.max_positions}.",
        )
    if tokens is not None and tokens >= (length or model.max_positions):
        limit = f"max_length = {length}" if length else f"the model's {model.max_positions}"
        raise _refuse(
            "max_tokens",
            f"max_tokens = {tokens} leaves no room for a prompt within {limit}",
            "Lower max_tokens"
            + (" or raise max_length." if length and length < model.max_positions else "."),
        )
    if values.get("thinking") and not model.thinking:
        raise _refuse(
            "thinking",
            "thinking = true, but the model's chat template has no think block to switch on",
            "Leave thinking out, or use a model with a thinking template.",
        )
    if values.get("thinking_length_penalty") and not values["thinking"]:
        raise UserError(
            "SETTING_NOT_APPLICABLE",
            f"thinking_length_penalty = {values['thinking_length_penalty']:g} without thinking: "
            "there is no think block to measure",
            hint="Set thinking = true, or leave thinking_length_penalty out.",
            field="settings.thinking_length_penalty",
        )
    if values.get("quantization") == "nf4" and values.get("precision") == "float32":
        raise _refuse(
            "precision",
            'precision = "float32" with quantization = "nf4", which computes in bfloat16',
            "Leave precision out, or leave quantization out.",
        )
    if values.get("quantization") == "nf4" and values.get("sampler") == "vllm":
        raise _refuse(
            "sampler",
            'sampler = "vllm" with quantization = "nf4": vLLM would sample from other weights than '
            "are trained",
            "Leave sampler out.",
        )
    name = {"sft": "batch_size", "grpo": "prompts_per_step"}.get(algorithm, "")
    rows = values.get("max_examples")
    if name and rows is not None and values[name] > rows:
        kept = " (max_examples)" if filled.sources["max_examples"] == USER else ""
        raise _refuse(
            name,
            f"{name} = {values[name]} is above the {rows} train rows{kept}"
            + (f" of {env.env_id}" if env else ""),
            f"Use at most {rows}.",
        )


def _refuse(name: str, message: str, hint: str) -> UserError:
    return UserError("SETTING_INVALID", message, hint=hint, field=f"settings.{name}")
