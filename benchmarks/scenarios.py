"""The scenarios of `diagnosis.py`: what is planted, and what `diagnose` must say first."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import planted
from benchmarks.planted import Tasks
from engine.skills import pebble as skills

GRPO: dict[str, Any] = {
    "steps": 20,
    "prompts_per_step": 8,
    "group_size": 8,
    "eval_every": 10,
    "eval_rows": 200,
    "learning_rate": 1e-3,
    "max_tokens": 24,
}
RISK = {"accept_reward_risk": True}
SFT: dict[str, Any] = {"batch_size": 16, "eval_rows": 160}


@dataclass(frozen=True)
class Scenario:
    """A run and what is right to say about it.

    Attributes:
        tasks: the environment.
        settings: of the run; the defaults otherwise.
        first: ids of which one must come first; () for a healthy run.
        cure: the levers that cure it, as `diagnosis.is_cure` reads them.
        survey: the rows of the survey of agents that it replays.
        base: the base model.
        start, teacher: scenarios whose run this one goes on from, or learns from.
        alerts, alert_by: one of these alerts must come by that step; 0 for no such rule.
    """

    tasks: Tasks
    algorithm: str
    settings: Mapping[str, Any]
    first: tuple[str, ...] = ()
    cure: str = ""
    survey: str = ""
    base: str = "pebble"
    start: str = ""
    teacher: str = ""
    alerts: tuple[str, ...] = field(default=())
    alert_by: int = 0


_HARM = ("below_start", "unstable")
_LOWER = "learning_rate down"
_LONG = "The answer to this question is {gold}, as you see."

SCENARIOS: dict[str, Scenario] = {
    # --- limits -----------------------------------------------------------------------------------
    "reference_too_long": Scenario(
        Tasks(score=planted.PREFIX, answer=_LONG),
        "grpo",
        GRPO | RISK | {"max_tokens": 24},
        ("truncation",),
        "max_tokens >= 44",
        "7, 8",
    ),
    "reference_too_long_and_paid": Scenario(
        Tasks(score=planted.LENGTH_OF_THE_REFERENCE, answer=_LONG),
        "grpo",
        GRPO | RISK | {"max_tokens": 24},
        ("truncation",),
        "max_tokens >= 44",
        "7",
    ),
    "answers_cut": Scenario(
        Tasks(), "grpo", GRPO | {"max_tokens": 3}, ("truncation",), "max_tokens up", "8"
    ),
    "rows_cut": Scenario(
        Tasks(answer=_LONG),
        "sft",
        SFT | {"max_length": 40, "steps": 40},
        ("truncation",),
        "max_length up",
    ),
    "out_of_turns": Scenario(
        Tasks(source=planted.GAME_PLAIN),
        "grpo",
        GRPO | {"max_turns": 2},
        ("truncation",),
        "max_turns up",
    ),
    "thinking_cut": Scenario(
        Tasks(),
        "grpo",
        GRPO | {"thinking": True, "max_tokens": 16},
        ("truncation", "overthinking"),
        "max_tokens up | thinking_length_penalty up",
    ),
    # --- rates and lengths ------------------------------------------------------------------------
    "rate_far_too_high": Scenario(
        Tasks(),
        "grpo",
        GRPO | {"learning_rate": 0.03},
        _HARM,
        _LOWER,
        alerts=("reward_falls", *_HARM),
        alert_by=10,
    ),
    "reward_halved": Scenario(
        Tasks(draw=skills.sort_numbers),
        "grpo",
        GRPO | {"learning_rate": 8e-3},
        _HARM,
        _LOWER,
        "21, 22",
        alerts=("reward_falls", *_HARM),
        alert_by=10,
    ),
    "divergence_jumps": Scenario(
        Tasks(), "grpo", GRPO | {"learning_rate": 0.015, "kl_coef": 0.05}, _HARM, _LOWER
    ),
    "rate_far_too_low": Scenario(
        Tasks(), "grpo", GRPO | {"learning_rate": 1e-6}, ("no_update",), "learning_rate up"
    ),
    "sft_rate_far_too_high": Scenario(
        Tasks(draw=skills.sort_numbers, replay=1.0),
        "sft",
        SFT | {"learning_rate": 0.1, "steps": 60},
        (*_HARM, "overfitting"),
        _LOWER,
    ),
    "sft_rate_far_too_low": Scenario(
        Tasks(draw=skills.ends),
        "sft",
        SFT | {"learning_rate": 1e-6, "steps": 40},
        ("no_update",),
        "learning_rate up",
    ),
    "sft_rate_too_low": Scenario(
        Tasks(draw=skills.ends),
        "sft",
        SFT | {"learning_rate": 3e-5, "steps": 60},
        ("too_short", "no_update"),
        "learning_rate up | steps up",
    ),
    "too_few_steps": Scenario(
        Tasks(draw=skills.ends, answer="It begins with {gold}", train=320),
        "sft",
        {"epochs": 1, "batch_size": 32, "eval_rows": 160},
        ("too_short",),
        "steps up | epochs up",
        "21, 22",
    ),
    "overfits_few_rows": Scenario(
        Tasks(train=24, noise=0.3),
        "sft",
        {"steps": 120, "batch_size": 8, "eval_every": 15, "learning_rate": 5e-3, "eval_rows": 160},
        ("overfitting", "rows_disagree"),
        "steps down | edit rows",
    ),
    "one_row_many_times": Scenario(
        Tasks(draw=skills.sort_numbers, train=8, copies=40),
        "sft",
        {"steps": 100, "batch_size": 16, "eval_every": 20, "eval_rows": 160},
        ("overfitting", "duplicates"),
        "steps down | edit rows",
    ),
    # --- rewards ----------------------------------------------------------------------------------
    "reward_always_0": Scenario(
        Tasks(score=planted.NOTHING),
        "grpo",
        GRPO | RISK,
        ("uniform_groups", "plateau"),
        r"edit score\(\)",
    ),
    "reward_always_1": Scenario(
        Tasks(score=planted.EVERYTHING),
        "grpo",
        GRPO | RISK,
        ("uniform_groups", "plateau"),
        r"edit score\(\)",
    ),
    "plateau_from_the_start": Scenario(
        Tasks(draw=skills.subtract, score=planted.A_NUMBER_PAYS),
        "grpo",
        GRPO,
        ("plateau",),
        r"edit score\(\)|SFT",
        "31",
    ),
    "plateau_learnt": Scenario(
        Tasks(draw=planted.hard_subtraction, score=planted.A_SENTENCE_PAYS),
        "grpo",
        GRPO | {"steps": 40, "eval_every": 20},
        ("plateau",),
        r"edit score\(\)|SFT",
        "31",
    ),
    "length_is_paid": Scenario(
        Tasks(score=planted.LENGTH),
        "grpo",
        GRPO | RISK | {"steps": 30, "max_tokens": 48},
        ("reward_hacking",),
        r"edit score\(\)",
    ),
    "length_is_mostly_paid": Scenario(
        Tasks(score=planted.MOSTLY_LENGTH),
        "grpo",
        GRPO | RISK | {"steps": 30, "max_tokens": 48, "seed": 7},
        ("reward_hacking",),
        r"edit score\(\)",
    ),
    "form_is_paid": Scenario(
        Tasks(score=planted.FORM, answer="Answer: {gold}"),
        "grpo",
        GRPO | RISK | {"steps": 30},
        ("reward_hacking", "plateau"),
        r"edit score\(\)",
    ),
    "judge_is_pleased": Scenario(
        Tasks(score=planted.PLEASED_JUDGE),
        "grpo",
        GRPO | RISK,
        ("judge_pleasing",),
        r"edit score\(\)",
    ),
    "scorer_raises": Scenario(
        Tasks(score=planted.RAISES),
        "grpo",
        GRPO | {"max_reward_errors": 0.6},
        ("reward_errors",),
        r"edit score\(\)",
    ),
    "scorer_ends_the_run": Scenario(
        Tasks(score=planted.RAISES),
        "grpo",
        GRPO | {"max_reward_errors": 0.05},
        ("reward_errors",),
        r"edit score\(\)",
    ),
    "turns_raise": Scenario(
        Tasks(source=planted.GAME_THAT_RAISES),
        "grpo",
        GRPO | RISK | {"max_reward_errors": 1.0},
        ("reward_errors",),
        r"edit (score|step)\(\)",
    ),
    "scorer_is_slow": Scenario(
        Tasks(score=planted.SLOW),
        "grpo",
        GRPO | {"eval_rows": 60},
        ("slow_reward",),
        r"edit score\(\)",
    ),
    "scorer_counts_calls": Scenario(
        Tasks(score=planted.COUNTS_CALLS),
        "grpo",
        GRPO | RISK,
        ("scorer_moves",),
        r"edit score\(\)",
    ),
    # --- groups -----------------------------------------------------------------------------------
    "too_hard": Scenario(
        Tasks(draw=planted.hard_subtraction), "grpo", GRPO, ("too_hard",), "edit SFT"
    ),
    "too_easy": Scenario(
        Tasks(draw=skills.compare), "grpo", GRPO, ("too_easy",), "edit harder tasks"
    ),
    "solved_early": Scenario(
        Tasks(draw=skills.compare, score=planted.EXACT, answer="Answer: {gold}"),
        "grpo",
        GRPO | {"steps": 60, "eval_every": 20},
        ("solved",),
        "steps down | stop_early = alert | edit harder",
        "18",
        alerts=("solved",),
        alert_by=50,
    ),
    "cold": Scenario(
        Tasks(), "grpo", GRPO | {"temperature": 0.01}, ("uniform_groups",), "temperature up"
    ),
    "groups_of_two": Scenario(
        Tasks(score=planted.EXACT, answer="Answer: {gold}"),
        "grpo",
        GRPO | {"group_size": 2, "prompts_per_step": 16, "learning_rate": 2e-4},
        ("uniform_groups",),
        "group_size up",
    ),
    "goes_on_from_a_frozen_run": Scenario(
        Tasks(),
        "grpo",
        GRPO,
        ("worse_start",),
        "edit start from",
        start="divergence_jumps",
    ),
    "goes_on_from_a_solved_run": Scenario(
        Tasks(draw=skills.compare, score=planted.EXACT, answer="Answer: {gold}"),
        "grpo",
        GRPO,
        ("too_easy",),
        "edit harder tasks",
        start="solved_early",
    ),
    # --- rows -------------------------------------------------------------------------------------
    "held_out_rows_are_taught": Scenario(
        Tasks(draw=skills.ends, leaked=0.8, replay=1.0),
        "sft",
        SFT | {"steps": 80, "learning_rate": 2e-3},
        ("leak",),
        "edit drop_leaks|held-out",
        "12",
    ),
    "contradictory_rows": Scenario(
        Tasks(draw=skills.sort_numbers, train=160, answers_of_a_prompt=4, replay=1.0),
        "sft",
        SFT | {"steps": 60, "learning_rate": 2e-3},
        ("contradictory_rows", "below_start"),
        "edit rows|answers",
    ),
    "wrong_labels": Scenario(
        Tasks(draw=skills.sort_numbers, train=400, noise=0.7),
        "sft",
        SFT | {"steps": 75, "learning_rate": 2e-3},
        ("rows_disagree", "below_start", "overfitting"),
        "edit answers|rows",
    ),
    "held_out_from_elsewhere": Scenario(
        Tasks(draw=skills.upper, answer="<{gold}>", heldout_draw=skills.sort_letters),
        "sft",
        SFT | {"steps": 60},
        ("other_exam", "rows_disagree"),
        "edit held-out|another task",
    ),
    "exam_of_another_skill": Scenario(
        Tasks(draw=skills.add_two, heldout_draw=planted.hard_subtraction),
        "grpo",
        GRPO | {"steps": 30},
        ("other_exam",),
        "edit held-out",
    ),
    "wording_of_the_exam": Scenario(
        Tasks(
            draw=skills.ends,
            replay=1.0,
            heldout_prompt="You know letters. Task: {} Say which letters stand outside.",
        ),
        "sft",
        SFT | {"steps": 110, "learning_rate": 2e-3},
        ("other_exam",),
        "edit held-out|wording",
        "11",
    ),
    "forgets": Scenario(
        Tasks(draw=skills.ends, train=160),
        "sft",
        {"steps": 90, "learning_rate": 1.5e-3, "batch_size": 24, "eval_every": 30, "keep": 0},
        ("forgetting",),
        "edit mix | keep up",
        "1, 7",
    ),
    "forgets_with_gradient_spikes": Scenario(
        Tasks(draw=skills.ends, train=480),
        "sft",
        {"steps": 150, "learning_rate": 4e-3, "batch_size": 8, "eval_every": 50, "eval_rows": 160},
        ("forgetting",),
        "edit mix | keep up",
        "7",
    ),
    "exam_too_small": Scenario(
        Tasks(heldout=24),
        "grpo",
        GRPO | {"steps": 6, "eval_every": 3, "learning_rate": 2e-4, "eval_rows": 24},
        ("underpowered",),
        "edit held-out rows | eval_rows up",
        "24",
    ),
    # --- pairs and teachers -----------------------------------------------------------------------
    "pairs_reversed": Scenario(
        Tasks(pairs="reversed", train=400),
        "dpo",
        {"steps": 40, "batch_size": 16, "eval_rows": 160, "eval_every": 10},
        ("below_start",),
        "edit pairs|chosen",
    ),
    "pairs_alike": Scenario(
        Tasks(draw=skills.subtract, pairs="alike", train=400),
        "dpo",
        {"steps": 40, "batch_size": 16, "eval_rows": 160, "eval_every": 10},
        ("pairs_alike",),
        "edit pairs",
    ),
    "worse_teacher": Scenario(
        Tasks(draw=skills.sort_numbers),
        "distill",
        {"steps": 20, "prompts_per_step": 8, "eval_rows": 160, "eval_every": 10, "max_tokens": 24},
        ("below_start",),
        "edit teacher | teacher",
        teacher="reward_halved",
    ),
    # --- a language model -------------------------------------------------------------------------
    "smollm2_plateau": Scenario(
        Tasks(
            draw=planted.review,
            score=planted.TAG_OR_SENTENCE,
            answer="<{gold}>",
            train=120,
            heldout=24,
        ),
        "grpo",
        RISK
        | {
            "steps": 20,
            "prompts_per_step": 4,
            "group_size": 6,
            "max_tokens": 16,
            "eval_every": 20,
            "eval_rows": 24,
        },
        ("plateau",),
        r"edit score\(\)|SFT",
        "31",
        base="smollm2",
    ),
    "smollm2_reference_too_long": Scenario(
        Tasks(
            draw=planted.review,
            score=planted.PREFIX,
            answer="This review is {gold}, because the customer says so in plain words.",
            train=120,
            heldout=24,
        ),
        "grpo",
        RISK
        | {
            "steps": 8,
            "prompts_per_step": 4,
            "group_size": 4,
            "max_tokens": 8,
            "eval_every": 8,
            "eval_rows": 24,
        },
        ("truncation",),
        "max_tokens >= 15",
        "7, 8",
        base="smollm2",
    ),
    "smollm2_rate_far_too_high": Scenario(
        Tasks(draw=planted.review, train=120, heldout=40),
        "sft",
        {"steps": 12, "batch_size": 8, "learning_rate": 0.1, "eval_rows": 40, "eval_every": 4},
        (*_HARM, "overfitting"),
        _LOWER,
        base="smollm2",
    ),
    "smollm2_reward_always_1": Scenario(
        Tasks(draw=planted.review, score=planted.EVERYTHING, train=120, heldout=16),
        "grpo",
        RISK
        | {
            "steps": 10,
            "prompts_per_step": 2,
            "group_size": 4,
            "max_tokens": 12,
            "eval_every": 10,
            "eval_rows": 16,
        },
        ("uniform_groups", "plateau"),
        r"edit score\(\)",
        base="smollm2",
    ),
    "smollm2_forgets": Scenario(
        Tasks(draw=planted.review, train=150, heldout=60),
        "sft",
        {"steps": 12, "batch_size": 8, "eval_rows": 60, "eval_every": 6, "keep": 0},
        ("forgetting",),
        "edit mix | keep up",
        "1, 7",
        base="smollm2",
    ),
    "smollm2_grpo_forgets": Scenario(
        Tasks(draw=planted.review, score=planted.WORD_OR_SENTENCE, train=120, heldout=24),
        "grpo",
        {
            "steps": 20,
            "prompts_per_step": 4,
            "group_size": 6,
            "max_tokens": 16,
            "eval_every": 20,
            "eval_rows": 24,
            "learning_rate": 3.5e-4,
        },
        ("forgetting",),
        "kl_coef up | learning_rate down",
        "1, 7",
        base="smollm2",
    ),
    "smollm2_too_hard": Scenario(
        Tasks(draw=planted.hard_subtraction, score=planted.EXACT, train=120, heldout=40),
        "grpo",
        {
            "steps": 8,
            "prompts_per_step": 4,
            "group_size": 4,
            "max_tokens": 48,
            "eval_every": 8,
            "eval_rows": 40,
        },
        ("too_hard",),
        "edit SFT",
        base="smollm2",
    ),
    # --- healthy ----------------------------------------------------------------------------------
    "healthy_sums": Scenario(Tasks(heldout=800), "grpo", GRPO | {"eval_rows": 400}),
    "healthy_sums_slow": Scenario(
        Tasks(heldout=800),
        "grpo",
        GRPO | {"learning_rate": 5e-4, "steps": 30, "eval_rows": 400, "seed": 1},
    ),
    "healthy_sums_kl": Scenario(
        Tasks(heldout=800),
        "grpo",
        GRPO | {"kl_coef": 0.01, "temperature": 0.8, "eval_rows": 400, "seed": 2},
    ),
    "healthy_large_groups": Scenario(
        Tasks(heldout=800),
        "grpo",
        GRPO | {"group_size": 16, "loss": "dr_grpo", "eval_rows": 400, "seed": 3},
    ),
    "healthy_digits_in_place": Scenario(
        Tasks(heldout=800, score=planted.DIGITS_IN_PLACE),
        "grpo",
        GRPO | {"advantage": "rloo", "eval_rows": 400, "seed": 4},
    ),
    "healthy_sums_long": Scenario(
        Tasks(heldout=800),
        "grpo",
        GRPO | {"steps": 45, "eval_every": 15, "eval_rows": 400, "seed": 5},
    ),
    "healthy_exact_form": Scenario(
        Tasks(heldout=400, score=planted.EXACT, answer="Answer: {gold}"),
        "grpo",
        GRPO | {"steps": 30, "eval_rows": 400, "seed": 6},
    ),
    "healthy_sft_ends": Scenario(
        Tasks(draw=skills.ends, train=300, heldout=400, replay=3.0),
        "sft",
        {"steps": 110, "learning_rate": 1.5e-3, "batch_size": 24, "eval_rows": 400},
    ),
    "healthy_sft_numbers": Scenario(
        Tasks(draw=skills.sort_numbers, train=400, heldout=800, replay=2.0),
        "sft",
        {"epochs": 2, "batch_size": 24, "eval_rows": 800},
    ),
    "healthy_pairs": Scenario(
        Tasks(pairs="wrong", train=400, heldout=800),
        "dpo",
        {"steps": 40, "batch_size": 16, "eval_rows": 400},
    ),
    "healthy_smollm2_grpo": Scenario(
        Tasks(draw=planted.review, score=planted.WORD_OR_SENTENCE, train=120, heldout=24),
        "grpo",
        {
            "steps": 20,
            "prompts_per_step": 4,
            "group_size": 6,
            "max_tokens": 16,
            "eval_every": 20,
            "eval_rows": 24,
            "learning_rate": 1e-4,
        },
        base="smollm2",
    ),
    "healthy_smollm2_sft": Scenario(
        Tasks(draw=planted.review, train=150, heldout=60),
        "sft",
        {
            "steps": 6,
            "batch_size": 8,
            "learning_rate": 2e-4,
            "lr_schedule": "constant",
            "eval_rows": 60,
            "eval_every": 3,
        },
        base="smollm2",
    ),
}
