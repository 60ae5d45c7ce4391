"""The default of each setting.

Sources of the numbers: "LoRA without regret" (thinkingmachines.ai/blog/lora) for adapters on all
linear layers, alpha 32 with any rank, about ten times the learning rate of full fine-tuning, and
small batches; DAPO (arXiv 2503.14476) for the token-mean loss and the wider upper clip; GSPO
(arXiv 2507.18071) for its narrow clips.
"""

import math
from dataclasses import dataclass
from typing import Any

from engine.core.hardware import Device, Hardware
from engine.environments.env_facts import EnvFacts
from engine.models.model_files import AdapterFacts, ModelFacts
from engine.models.sizing.layers import LoadedModel
from engine.models.sizing.plan import Job as SizedJob
from engine.models.sizing.score_workers import default_workers
from engine.models.sizing.usual_steps import (
    UNKNOWN_ROWS,
    exams_of_rollouts,
    learning_rate,
    rollout_steps,
    sft_batch_size,
    sft_epochs,
    sft_updates,
)
from engine.records.settings import (
    HARMLESS_STEPS,
    ROW_ALGORITHMS,
    USUAL_GRPO_KEEP,
    USUAL_KEEP,
    GivenSettings,
)

USER, RECIPE, MODEL, HARDWARE, PARENT = "user", "recipe", "model", "hardware", "parent run"
EVAL_ROWS = 400
SKILL_ROWS = 200  # questions of a battery: 6 fewer right answers (3 points) are significant
# Loss -> (clip_low, clip_high); the other losses have _USUAL_CLIPS.
_CLIPS = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
_USUAL_CLIPS = (0.2, 0.28)
_LONGEST_DEFAULT = 8192  # tokens; a longer context is used only on request
_OTHER_WORDS = 192  # tokens that other words of a prompt and its tools may add to a row
_UNKNOWN_ROW_LENGTH, _UNKNOWN_PROMPT_LENGTH = 2048, 512  # assumed tokens without an environment
_UNKNOWN_CORES = 2  # assumed cores if the machine is not known
_LARGE_BATCH = 64  # a larger batch gets a warning
_MIN_ANSWER_TOKENS = 16  # if less room is left, tasks with the longest prompts are left out


@dataclass(frozen=True)
class Facts:
    """The facts that defaults depend on.

    Attributes:
        env: the environment; None if there is none: defaults then assume rows of usual length.
        hardware: the machine; None counts as a CPU.
        inherited: shape of the adapter that the run continues; None for a new adapter.
        attempts: answers per task in an evaluation.
        vllm, vllm_fault: whether vLLM is set up here; why it is switched off, "" if it is not.
    """

    model: ModelFacts
    env: EnvFacts | None
    hardware: Hardware | None = None
    inherited: AdapterFacts | None = None
    attempts: int = 1
    vllm: bool = False
    vllm_fault: str = ""

    def rows(self, algorithm: str) -> int | None:
        """Return how many train rows the algorithm can use; None if there is no environment."""
        if self.env is None:
            return None
        usable_rows = {"sft": self.env.answered_rows, "dpo": self.env.paired_rows}
        return usable_rows.get(algorithm, self.env.train_rows)


@dataclass(frozen=True)
class SamplingLimits:
    """The most tokens of a turn, turns of an episode, and tokens of the whole sequence."""

    max_tokens: int
    max_turns: int
    max_length: int


class SettingsDraft:
    """The settings of a run while defaults are added to them; those that the user gave are kept.

    Attributes:
        values: the settings so far.
        sources: setting -> source of its value, such as `USER` or `RECIPE`.
        warnings: sentences for the user about the values.
    """

    def __init__(self, given: GivenSettings) -> None:
        """Start with the settings that the user gave."""
        self.values = dict(given)
        self.sources = dict.fromkeys(given, USER)
        self.warnings: list[str] = []

    def __getitem__(self, name: str) -> Any:
        """Return the value of the setting `name`, which must have one."""
        return self.values[name]

    def set_default(self, name: str, value: Any, source: str = RECIPE) -> None:
        """Set `name` unless it has a value; `source` says where the new value comes from."""
        if name not in self.values:
            self.values[name] = value
            self.sources[name] = source

    def lower_to(self, name: str, limit: int | None, reason: str) -> None:
        """Lower the setting `name` to `limit` if its value is above, and add a warning.

        Nothing happens if `limit` is None (no limit is known) or the setting has no value.
        """
        if limit is not None and name in self.values and self.values[name] > limit:
            self.warnings.append(f"{name} = {self.values[name]} was cut to {limit}: {reason}.")
            self.values[name] = limit


def fill_defaults(algorithm: str, user_settings: GivenSettings, facts: Facts) -> SettingsDraft:
    """Choose all settings of `algorithm`; return them with their sources, and warnings.

    `algorithm` may also be "evaluate". The user's values are kept, except that a count above the
    number of rows is lowered to that number.
    """
    # The order matters: later defaults depend on the values of earlier ones.
    draft = SettingsDraft(user_settings)
    if algorithm == "evaluate":
        _evaluation_defaults(draft, facts)
        return draft
    _adapter_defaults(draft, facts)
    _machine_defaults(draft, facts)
    _data_defaults(draft, algorithm, facts)
    if algorithm in ROW_ALGORITHMS:
        _row_defaults(draft, algorithm, facts)
    else:
        _rollout_defaults(draft, algorithm, facts)
    _optimizer_defaults(draft, algorithm, facts)
    _interval_defaults(draft, algorithm, facts)
    _scoring_defaults(draft, facts)
    return draft


def _scoring_defaults(draft: SettingsDraft, facts: Facts) -> None:
    """Set how many processes score, and the limits of their judges (models that score)."""
    env = facts.env
    cores = facts.hardware.cores if facts.hardware else _UNKNOWN_CORES
    workers = default_workers(env.score_s, env.waits, cores) if env else 1
    draft.set_default("score_workers", workers, source=HARDWARE if workers > 1 else RECIPE)
    draft.set_default("max_judge_calls", None)
    draft.set_default("max_judge_cost", None)


def _evaluation_defaults(draft: SettingsDraft, facts: Facts) -> None:
    """Set the defaults of an evaluation. A single attempt at a task is greedy."""
    _answer_defaults(draft, facts)
    _scoring_defaults(draft, facts)
    draft.set_default("top_p", 1.0)
    draft.set_default("top_k", 0)
    draft.set_default("min_p", 0.0)
    draft.set_default("temperature", 0.0 if facts.attempts == 1 else 1.0)
    draft.set_default("seed", 0)
    draft.set_default("max_calls", None)
    draft.set_default("max_cost", None)


def _adapter_defaults(draft: SettingsDraft, facts: Facts) -> None:
    """Set the shape of the adapter: that of the adapter which the run continues, else the usual
    values."""
    inherited = facts.inherited
    if inherited is not None:
        # This may overwrite values of the user, but `check_inherited` has refused different ones.
        for name, value in inherited_settings(inherited).items():
            draft.values[name] = value
            draft.sources[name] = PARENT
    draft.set_default("lora_rank", 16)
    draft.set_default("lora_alpha", 32)
    draft.set_default("lora_targets", facts.model.targets)
    draft.set_default("lora_dropout", 0.0)
    if draft["lora_rank"] > facts.model.hidden:
        draft.warnings.append(
            f"lora_rank = {draft['lora_rank']} is above the model's width of "
            f"{facts.model.hidden}: more rank than a full update has."
        )


def inherited_settings(adapter: AdapterFacts) -> GivenSettings:
    """Return the settings that a run takes from the adapter which it continues."""
    return {
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_targets": list(adapter.targets),
    }


def _machine_defaults(draft: SettingsDraft, facts: Facts) -> None:
    """Set quantization, precision and gradient checkpointing, by the GPU if there is one."""
    gpu = _gpu_of(facts)
    draft.set_default("quantization", "none")
    if draft.values.get("precision") in (None, "auto"):  # "auto" means that it was left out
        # Set directly, so that "auto" is replaced. The 4-bit weights of nf4 need bfloat16.
        use_bfloat16 = draft["quantization"] == "nf4" or (gpu is not None and gpu.bf16)
        draft.values["precision"] = "bfloat16" if use_bfloat16 else "float32"
        draft.sources["precision"] = HARDWARE
    # Gradient checkpointing saves memory and costs time. It is not needed if the weights take less
    # than a third of the memory, because the rest is enough for the activations.
    is_large_model = gpu is not None and facts.model.weight_bytes > gpu.memory_total / 3
    draft.set_default("gradient_checkpointing", is_large_model, source=HARDWARE)


def _data_defaults(draft: SettingsDraft, algorithm: str, facts: Facts) -> None:
    """Set the number of rows, the seed, and whether to stop early or to accept a reward risk."""
    rows = facts.rows(algorithm)
    draft.lower_to("max_examples", rows, "the environment has no more train rows")
    draft.set_default("max_examples", rows)
    draft.set_default("seed", 0)
    draft.set_default("accept_reward_risk", False)
    # Stopping early needs held-out tasks that show when learning ends.
    has_heldout = facts.env is not None and facts.env.measured_rows(by_pairs=False) > 0
    draft.set_default("stop_early", "heldout" if algorithm == "sft" and has_heldout else "none")


def _row_defaults(draft: SettingsDraft, algorithm: str, facts: Facts) -> None:
    """Set the batch size, epochs, steps and longest row of SFT and DPO, and what only one has."""
    env = facts.env
    rows = _trained_rows(draft, algorithm, env)
    if algorithm == "sft":
        updates = sft_updates(facts.model.params)
        draft.set_default("batch_size", sft_batch_size(rows, updates))
        _sft_defaults(draft, env)
        epochs = sft_epochs(rows, updates, draft["batch_size"])
    else:
        # An eighth of the pairs, from 1 to 32.
        draft.set_default("batch_size", 32 if rows is None else min(32, max(1, rows // 8)))
        draft.set_default("beta", 0.1)
        draft.set_default("sft_weight", 0.0)
        epochs = 1  # DPO overfits sooner than SFT
    _step_defaults(draft, epochs, rows)
    if algorithm == "sft":
        _replay_defaults(draft, USUAL_KEEP)
        draft.set_default("vary_wording", 0.0)
    longest_row = env.longest_row(algorithm) if env else 0  # tokens; 0: not known
    other_words = _room_for_other_words(draft)
    _length_default(draft, facts, (longest_row or _UNKNOWN_ROW_LENGTH) + other_words)
    if draft["batch_size"] > _LARGE_BATCH:
        draft.warnings.append("Adapters learn worse from large batches; 32 rows are plenty.")


def _trained_rows(draft: SettingsDraft, algorithm: str, env: EnvFacts | None) -> int | None:
    """Return how many rows SFT or DPO trains on; None if that is not known.

    The number is `max_examples`. For SFT it is larger if the chat template splits a conversation
    into several rows.
    """
    rows = draft["max_examples"]
    if algorithm == "sft" and rows is not None and env is not None and env.answered_rows:
        return round(rows * env.sft_rows / env.answered_rows)
    return rows


def _step_defaults(draft: SettingsDraft, epochs: int, rows: int | None) -> None:
    """Set epochs and steps; `rows` is the number of rows in one epoch, None if not known.

    If the user gave no steps, they follow from the user's epochs, or else from `epochs`.
    """
    if draft.values.get("steps") is None:
        draft.set_default("epochs", epochs)
        steps_per_epoch = math.ceil((rows or UNKNOWN_ROWS) / draft["batch_size"])
        draft.set_default("steps", draft["epochs"] * steps_per_epoch)
    else:
        draft.set_default("epochs", None)  # `steps` alone says how long to train


def _sft_defaults(draft: SettingsDraft, env: EnvFacts | None) -> None:
    """Set the settings that only SFT has. Thoughts are required if every counted answer has one."""
    draft.set_default("loss_on", "assistant")
    draft.set_default("packing", True)
    every_answer_reasons = (
        env is not None and env.answered_lengths > 0 and env.reasoned == env.answered_lengths
    )
    draft.set_default("thinking", "require" if every_answer_reasons else "keep")


def _replay_defaults(draft: SettingsDraft, usual_keep: float) -> None:
    """Set what SFT or GRPO replays (trains on again) to keep earlier skills.

    A run with enough steps to overwrite skills replays the share `usual_keep` of each batch. Tasks
    close to what the model can do already lose nothing by that (benchmarks/RESULTS.md)."""
    replays = draft["steps"] > HARMLESS_STEPS or draft.values.get("keep_env")
    draft.set_default("keep", usual_keep if replays else 0.0)
    draft.set_default("keep_env", "")
    draft.set_default("keep_answers", "reference")


def _rollout_defaults(draft: SettingsDraft, algorithm: str, facts: Facts) -> None:
    """Set what GRPO and distillation have in common, and what only one of them has."""
    rows = draft["max_examples"]  # None if the number of train rows is not known
    draft.set_default("steps", rollout_steps(algorithm, facts.model.params))
    prompts_per_step = 16 if rows is None else max(1, min(16, rows))
    draft.set_default("prompts_per_step", prompts_per_step)
    _answer_defaults(draft, facts)
    draft.set_default("tis_cap", 2.0)
    draft.set_default("max_reward_errors", 0.2)
    if algorithm == "distill":
        # Fewer completions than in GRPO are enough, because a teacher rates every single token.
        draft.set_default("group_size", 4)
        draft.set_default("teacher_model", "")
        draft.set_default("teacher_key_env", "")
    else:
        _grpo_defaults(draft)
    prompt_tokens = facts.env.longest_prompt if facts.env else _UNKNOWN_PROMPT_LENGTH
    answer_tokens = _tokens_after_prompt(draft["max_turns"], draft["max_tokens"])
    other_words = _room_for_other_words(draft)
    _length_default(draft, facts, prompt_tokens + answer_tokens + other_words)
    longest_sequence = min(draft["max_length"], prompt_tokens + answer_tokens + other_words)
    _sampler_default(draft, facts, longest_sequence)
    if algorithm != "distill":
        _warn_of_grpo_sampling(draft, facts)


def _grpo_defaults(draft: SettingsDraft) -> None:
    """Set the settings of GRPO: group, sampling, loss, advantage, updates and replay."""
    draft.set_default("group_size", 8)
    draft.set_default("temperature", 1.0)
    draft.set_default("top_p", 1.0)
    draft.set_default("top_k", 0)
    draft.set_default("min_p", 0.0)
    _loss_defaults(draft)
    draft.set_default("kl_coef", 0.0)
    draft.set_default("updates_per_batch", 1)
    draft.set_default("resample_uniform", 0)
    draft.set_default("thinking_length_penalty", 0.0)
    draft.set_default("async_sampling", False)
    draft.set_default("curriculum", "none")
    _replay_defaults(draft, USUAL_GRPO_KEEP)
    draft.set_default("vary_wording", 0.0)


def _loss_defaults(draft: SettingsDraft) -> None:
    """Set the loss of GRPO, and the advantage and clips with which that loss was published."""
    draft.set_default("loss", "dapo")
    advantage = "group_center" if draft["loss"] == "dr_grpo" else "group_norm"
    draft.set_default("advantage", advantage)
    clip_low, clip_high = _CLIPS.get(draft["loss"], _USUAL_CLIPS)
    draft.set_default("clip_low", clip_low)
    draft.set_default("clip_high", clip_high)


def _warn_of_grpo_sampling(draft: SettingsDraft, facts: Facts) -> None:
    """Warn of sampling settings that gain nothing or that distort the training.

    `async_sampling` gains nothing on one device; `top_p`, `top_k` and `min_p` change probabilities.
    """
    # If `gpus` was left out, the estimate may choose as many devices as the machine has.
    device_count = len(facts.hardware.devices) if facts.hardware else 1
    is_on_one_device = draft.values.get("gpus", device_count) == 1
    if draft["async_sampling"] and draft["sampler"] == "torch" and is_on_one_device:
        draft.warnings.append(
            "async_sampling = true with our own sampler shares one device between sampling and "
            "training: nothing is gained, and every batch is one update old."
        )
    if draft["top_p"] < 1 or draft["top_k"] or draft["min_p"]:
        draft.warnings.append(
            "top_p below 1, top_k and min_p sample from other probabilities than are trained; "
            "tis_cap corrects for a part of that only."
        )


def _sampler_default(draft: SettingsDraft, facts: Facts, longest_sequence: int) -> None:
    """Set the sampler of rollouts: vLLM if it suits the machine and the weights and has room, else
    our own. `longest_sequence` is the most tokens of a sampled sequence."""
    # On a CPU vLLM with an adapter is several times slower than our own sampler.
    gpu = _gpu_of(facts)
    why_not = _why_no_server(draft, facts, gpu, longest_sequence) if gpu is not None else ""
    if draft.values.get("sampler") not in (None, "auto"):  # the user chose a sampler
        if draft["sampler"] == "vllm" and why_not:
            draft.warnings.append(f"our own sampler will be used, not vLLM: {why_not}.")
        return
    # With quantization vLLM would still sample from the weights before rounding.
    is_unquantized = draft["quantization"] == "none"
    suits_vllm = gpu is not None and facts.vllm and is_unquantized
    if suits_vllm and why_not:
        draft.warnings.append(f"our own sampler is used, not vLLM: {why_not}.")
    draft.values["sampler"] = "vllm" if suits_vllm and not why_not else "torch"
    draft.sources["sampler"] = HARDWARE


def _gpu_of(facts: Facts) -> Device | None:
    """Return the GPU that the run is planned for; None if the run is planned for a CPU."""
    device = facts.hardware.device if facts.hardware else None
    return device if device is not None and device.kind == "cuda" else None


def _why_no_server(draft: SettingsDraft, facts: Facts, gpu: Device, longest_sequence: int) -> str:
    """Say why no vLLM server can sample on this GPU: it failed or lacks room; "" if it can."""
    assert facts.hardware is not None
    if facts.vllm_fault:
        return f"it is switched off on this device ({facts.vllm_fault})"
    ram = facts.hardware.ram_total
    loaded = LoadedModel(
        facts.model,
        draft["precision"],
        draft["quantization"],
        draft["lora_rank"],
        draft["lora_targets"],
    )
    job = SizedJob(loaded, gpu.kind, gpu.memory_total, longest_sequence, wants_server=True, ram=ram)
    return job.server.why_not


def _answer_defaults(draft: SettingsDraft, facts: Facts) -> None:
    """Set how long answers may get. The rules are the same for GRPO, distillation and evaluations,
    so that their results can be compared."""
    draft.set_default("thinking", False)
    draft.set_default("stop", [])
    draft.set_default("max_turns", _default_turns(facts.env))
    room = facts.model.max_positions
    max_length = draft.values.get("max_length")  # None unless the user gave it
    if max_length is not None:
        room = min(room, max_length)
    preferred = max_tokens(facts.env, draft["thinking"])
    tokens = _fit_into_context(room, facts.env, preferred)
    # A value that was lowered for lack of room has the model's context as its source, even if the
    # user's max_length left too little room.
    source = MODEL if tokens < preferred else RECIPE
    draft.set_default("max_tokens", tokens, source=source)


def max_tokens(env: EnvFacts | None, thinking: bool) -> int:
    """Return the default of max_tokens, the most tokens of a turn.

    - with reference answers: twice their longest turn, from 16 to 1024, but no less than what the
      turns of 19 in 20 answers need;
    - without reference answers: 256;
    - if the model thinks first (`thinking`): at least 1024.
    """
    limit = 256
    if env is not None and env.longest_turn:
        doubled = min(1024, max(16, 2 * env.longest_turn))
        limit = max(doubled, env.usual_turn)
    return max(limit, 1024) if thinking else limit


def exam_limits(
    env: EnvFacts, context: int, max_length: int, *, thinking: bool = False
) -> SamplingLimits:
    """Return the limits of sampling in the evaluations of an SFT or DPO run.

    Such a run has no settings for them; it gets the defaults of GRPO and `evaluate`.

    Args:
        context: the longest context of the model in tokens.
        max_length: the setting of the run, in tokens; raised if a whole episode would not fit.
        thinking: whether the model is asked to think first.
    """
    turns = _default_turns(env)
    tokens_per_turn = _fit_into_context(context, env, max_tokens(env, thinking))
    longest_episode = env.longest_prompt + _tokens_after_prompt(turns, tokens_per_turn)
    needed_length = max(max_length, longest_episode)
    return SamplingLimits(tokens_per_turn, turns, max_length=min(context, needed_length))


def _default_turns(env: EnvFacts | None) -> int:
    """Return the default of max_turns: 8 in a multi-turn environment, else 1."""
    return 8 if env is not None and env.multi_turn else 1


def _fit_into_context(context: int, env: EnvFacts | None, preferred: int) -> int:
    """Return `preferred` tokens, or as many as fit into the context after the longest prompt.

    If hardly any fit, or if no prompt was counted, the limit is half of the context. The result is
    at least 1.
    """
    longest_prompt = env.longest_prompt if env else 0
    available = context - longest_prompt - 1
    if not longest_prompt or available < _MIN_ANSWER_TOKENS:
        # The answer gets half of the context; tasks with longer prompts will be left out.
        available = context // 2
    return max(1, min(preferred, available))


def _tokens_after_prompt(turns: int, tokens_per_turn: int) -> int:
    """Return the most tokens that can follow the prompt of an episode.

    If there are several turns, 32 tokens are added for each, for the environment's replies.
    """
    if turns > 1:
        tokens_per_turn += 32
    return turns * tokens_per_turn


def _room_for_other_words(draft: SettingsDraft) -> int:
    """Return by how many tokens other words may lengthen a row; 0 if `vary_wording` is 0."""
    return _OTHER_WORDS if draft.values.get("vary_wording") else 0


def _length_default(draft: SettingsDraft, facts: Facts, preferred: int) -> None:
    """Set max_length to `preferred` tokens, rounded up to a multiple of 16, at least 32.

    The result is never above the model's context, and above 8192 tokens only if an answer of
    max_tokens would not fit otherwise.
    """
    context = facts.model.max_positions
    longest_default = min(context, _LONGEST_DEFAULT)
    rounded = max(32, math.ceil(preferred / 16) * 16)
    # A value that had to be cut has the model as its source.
    source = MODEL if rounded > longest_default else RECIPE
    length = min(rounded, longest_default)
    # SFT and DPO have no max_tokens: no answer needs room. One more token is for a prompt.
    needed_for_answer = draft.values.get("max_tokens", 0) + 1
    length = max(length, needed_for_answer)
    draft.set_default("max_length", min(context, length), source=source)


def _optimizer_defaults(draft: SettingsDraft, algorithm: str, facts: Facts) -> None:
    """Set the learning rate, its schedule, weight decay and gradient clipping."""
    usual = learning_rate(algorithm, facts.model.hidden, draft["steps"])
    draft.set_default("learning_rate", usual, source=MODEL)
    draft.set_default("lr_schedule", "cosine" if algorithm in ROW_ALGORITHMS else "constant")
    draft.set_default("warmup_ratio", {"sft": 0.03, "dpo": 0.1}.get(algorithm, 0.0))
    draft.set_default("weight_decay", 0.0)
    draft.set_default("max_grad_norm", 1.0)
    if draft["learning_rate"] > 10 * usual:
        draft.warnings.append(
            f"learning_rate = {draft['learning_rate']:g} is over ten times the "
            f"{usual:g} that suits this model."
        )


def _interval_defaults(draft: SettingsDraft, algorithm: str, facts: Facts) -> None:
    """Set the rows of an evaluation, how often the run evaluates and saves, and the devices.

    By default an SFT run evaluates eight times (the results may stop it early), a DPO run five
    times, the others as `exams_of_rollouts` says. A run saves whenever it evaluates.
    """
    heldout_rows = facts.env.measured_rows(by_pairs=algorithm == "dpo") if facts.env else None
    # If the user gave a larger number, it is lowered, with a warning.
    draft.lower_to("eval_rows", heldout_rows, "the environment has no more held-out rows")
    eval_rows = EVAL_ROWS if heldout_rows is None else min(EVAL_ROWS, heldout_rows)
    draft.set_default("eval_rows", eval_rows)
    evaluations = {"sft": 8, "dpo": 5}.get(algorithm, exams_of_rollouts(draft["steps"]))
    draft.set_default("eval_every", max(1, math.ceil(draft["steps"] / evaluations)))
    draft.set_default("save_every", draft["eval_every"])
    draft.set_default("keep_checkpoints", 3)
    draft.set_default("gpus", 1)
    draft.set_default("compute", "local")
    draft.set_default("shard_base", False)
    draft.set_default("skill_rows", SKILL_ROWS)
