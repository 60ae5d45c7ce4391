"""What `honesmith demo` trains: for each base model its tasks, settings and questions.

Every setting that is not named here has its default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.runs.submit.requests import GivenSettings

DEFAULT = "pebble"


@dataclass(frozen=True)
class TrainingPlan:
    """One training run of a demo, and what is asked afterwards.

    Attributes:
        algorithm: the run's algorithm; a demo trains once with each.
        env: folder name of an environment in `envs/examples`.
        settings: the settings of the run, without its seed.
        note: what the run is for.
        expect: the predicted verdict; "" for none.
        continues: whether the run starts from the best checkpoint of the run before; otherwise it
            starts from the base model.
        question: what the trained model and the base model are asked at the end; "" for nothing.
        answer_tokens: the most tokens of an answer.
    """

    algorithm: Literal["sft", "grpo"]
    env: str
    settings: GivenSettings
    note: str
    expect: str = ""
    continues: bool = False
    question: str = ""
    answer_tokens: int = 32


@dataclass(frozen=True)
class DemoPlan:
    """The trainings of one base model, in order.

    Attributes:
        model: reference of the base model. If it is missing and `honesmith models add` knows it,
            the demo fetches it.
        title: what the demo does, for its first line.
        trainings: the trainings in order, at least one.
        evaluated_rows: number of held-out tasks on which the models are compared at the end.
    """

    model: str
    title: str
    trainings: tuple[TrainingPlan, ...]
    evaluated_rows: int


PLANS: Mapping[str, DemoPlan] = {
    "pebble": DemoPlan(
        model="pebble",
        title="train pebble on arithmetic",
        trainings=(
            TrainingPlan(
                algorithm="sft",
                env="arithmetic",
                settings={
                    "max_examples": 64,
                    "batch_size": 8,
                    "steps": 22,
                    "eval_every": 11,
                    "eval_rows": 400,
                },
                note="learn the answer's form",
            ),
            TrainingPlan(
                algorithm="grpo",
                env="arithmetic",
                settings={
                    "steps": 28,
                    "eval_every": 14,
                    "eval_rows": 400,
                    "learning_rate": 1e-3,
                },
                note="maximise right sums",
                expect="better",
                continues=True,
                question="Add 47 and 38. End with #### and the sum.",
            ),
        ),
        evaluated_rows=400,
    ),
    "smollm2": DemoPlan(
        model="smollm2",
        title="train SmolLM2 on bookings by SFT and on reviews by GRPO",
        trainings=(
            TrainingPlan(
                algorithm="sft",
                env="booking_fields",
                settings={
                    "max_examples": 128,
                    "batch_size": 8,
                    "steps": 16,
                    "eval_every": 8,
                    "eval_rows": 80,
                    "skill_rows": 56,  # four of each skill: sampling is what takes long here
                },
                note="answer with the booking as JSON and nothing else",
                expect="better",
                question=(
                    "Read the message and answer only with JSON with the keys name, what (table, "
                    "room or lesson), day, time and people (a number).\n\nMessage: Hello from Ines "
                    "Duarte! Would there be a table for six people on Friday at 7 pm?"
                ),
                answer_tokens=64,
            ),
            TrainingPlan(
                algorithm="grpo",
                env="review_sentiment",
                settings={
                    "steps": 12,
                    "prompts_per_step": 8,
                    "group_size": 8,
                    "max_tokens": 12,
                    "eval_every": 6,
                    "eval_rows": 120,
                    "skill_rows": 56,
                },
                note="say which reviews are positive",
                expect="better",
                question=(
                    "Is this review positive or negative? Answer with one word.\n\nThe soup was "
                    "cold and nobody smiled at us. We will not come back."
                ),
                answer_tokens=16,
            ),
        ),
        evaluated_rows=200,
    ),
}
