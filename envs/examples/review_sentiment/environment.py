"""Say whether a customer's review is positive or negative, in a word or in a short sentence.

A small language model without training talks around it, or calls every review positive, and is
right now and then: so there is something to reward from the start and something to gain.
"""

import random
import re

from envs import Score, SingleTurnEnv, Task

THINGS = (
    "lamp,bicycle,camera,phone,jacket,printer,radio,tent,backpack,watch,toaster,chair,desk,kettle,"
    "headset,keyboard,blender,heater,suitcase,umbrella"
).split(",")
OPINIONS = {
    "positive": (
        "I love this {thing}",
        "The {thing} works better than I had hoped",
        "The {thing} is worth every cent",
        "What a wonderful {thing}",
        "The {thing} is easy to use and looks great",
        "My whole family enjoys the {thing}",
        "This is the best {thing} I ever had",
        "The {thing} came early and in perfect shape",
    ),
    "negative": (
        "I hate this {thing}",
        "The {thing} stopped working after two days",
        "The {thing} is a waste of money",
        "What an awful {thing}",
        "The {thing} is hard to use and looks cheap",
        "My whole family is annoyed by the {thing}",
        "This is the worst {thing} I ever had",
        "The {thing} came late and in pieces",
    ),
}
ENDINGS = {
    "positive": (
        "I would buy it again.",
        "The service was kind too.",
        "Five stars from me.",
        "I told all my friends to get one.",
        "Thank you so much!",
        "I use it every day and smile.",
    ),
    "negative": (
        "I want my money back.",
        "The service was rude too.",
        "One star from me.",
        "I told all my friends to stay away.",
        "Never again!",
        "It is in the bin now.",
    ),
}
QUESTION = "Is this review positive or negative? Answer with one word.\n\n{review}"
# What may stand around the label: "This review is positive." is as good as "positive".
FILLER = {"the", "this", "review", "is", "it", "a", "answer"}


class ReviewSentiment(SingleTurnEnv):
    """Reviews of an opinion and an ending each; those held out are of other things."""

    def __init__(self, train_tasks: int, heldout_tasks: int, seed: int) -> None:
        self.train_tasks = train_tasks
        self.heldout_tasks = heldout_tasks
        self.seed = seed

    def tasks(self) -> list[Task]:
        rng = random.Random(self.seed)
        tasks = []
        for split, things, count in (
            ("heldout", THINGS[::2], self.heldout_tasks),
            ("train", THINGS[1::2], self.train_tasks),
        ):
            reviews = [
                (label, f"{opinion.format(thing=thing)}. {ending}")
                for label, opinions in OPINIONS.items()
                for opinion in opinions
                for ending in ENDINGS[label]
                for thing in things
            ]
            for index, (label, review) in enumerate(rng.sample(reviews, count)):
                tasks.append(
                    Task(
                        id=f"{split}-{index}",
                        prompt=QUESTION.format(review=review),
                        answer=label,
                        split=split,
                        metadata={"label": label},
                    )
                )
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        """1 if the label is all that the answer says."""
        said = [word for word in re.findall(r"\w+", completion.lower()) if word not in FILLER]
        return Score(
            float(said == [task.answer]),
            success=said == [task.answer],
            metrics={"one_label": float(len(said) == 1 and said[0] in OPINIONS)},
        )


def load_environment(
    train_tasks: int = 400, heldout_tasks: int = 400, seed: int = 800
) -> ReviewSentiment:
    """800 reviews; every number can be set in environment.toml."""
    return ReviewSentiment(train_tasks, heldout_tasks, seed)
