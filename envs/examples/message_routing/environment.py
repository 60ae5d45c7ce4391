"""Send a customer's message to the right desk: one word of four.

A general language model without training is right in some of the messages and writes sentences in
others, so there is something to reward from the start and something to gain.
"""

import random

from envs import Score, SingleTurnEnv, Task

ITEMS = (
    "kettle lamp bicycle camera phone jacket printer radio tent backpack watch toaster chair desk "
    "speaker headset keyboard monitor blender heater"
).split()
WORDINGS = {
    "billing": (
        "I was charged twice for the {item}.",
        "The invoice for my {item} shows the wrong amount.",
        "When will the money for the {item} be paid back to my card?",
        "My card was declined when I paid for the {item}.",
        "Can I get a receipt for the {item} with my company's tax number?",
        "Why is there an extra fee on the bill for the {item}?",
    ),
    "delivery": (
        "My {item} has not arrived yet.",
        "The parcel with the {item} went to the wrong address.",
        "Where is the truck with my {item}?",
        "Can the {item} be shipped to another city?",
        "The courier left the {item} in the rain.",
        "How many days does it take until the {item} is at my door?",
    ),
    "repair": (
        "The {item} stopped working after one day.",
        "A part of the {item} is broken.",
        "The {item} makes a strange noise when I turn it on.",
        "Can somebody fix the {item}?",
        "The {item} does not switch on any more.",
        "There is a crack in the {item} and it leaks.",
    ),
    "account": (
        "I forgot my password and cannot log in to see the order of the {item}.",
        "Please change the email address in my profile, I ordered a {item}.",
        "I cannot sign in on your site to review the {item}.",
        "How do I delete my user profile after buying the {item}?",
        "The site says my username is locked since I ordered the {item}.",
        "I want to change my login name before I buy the {item}.",
    ),
}
QUESTION = (
    "Which desk should answer this customer: billing, delivery, repair or account? "
    "Answer with one word.\n\nCustomer: {message}"
)


class MessageRouting(SingleTurnEnv):
    """Every message of `WORDINGS` about every item, a share of them held out."""

    def __init__(self, heldout_share: float, seed: int) -> None:
        self.heldout_share = heldout_share
        self.seed = seed

    def tasks(self) -> list[Task]:
        rng = random.Random(self.seed)
        tasks = [
            Task(
                id=f"{desk}-{number}-{item}",
                prompt=QUESTION.format(message=wording.format(item=item)),
                answer=desk,
                metadata={"desk": desk},
            )
            for desk, wordings in WORDINGS.items()
            for number, wording in enumerate(wordings)
            for item in ITEMS
        ]
        rng.shuffle(tasks)
        heldout = round(len(tasks) * self.heldout_share)
        for index, task in enumerate(tasks):
            task.split = "heldout" if index < heldout else "train"
        return tasks

    def score(self, task: Task, completion: str) -> Score:
        """1 if the answer is the desk's name alone, in any case and with or without a full stop."""
        word = completion.strip().rstrip(".").lower()
        return Score(
            float(word == task.answer),
            success=word == task.answer,
            metrics={"one_word": float(word in WORDINGS)},
        )


def load_environment(heldout_share: float = 0.5, seed: int = 480) -> MessageRouting:
    """480 messages; every number can be set in environment.toml."""
    return MessageRouting(heldout_share, seed)
