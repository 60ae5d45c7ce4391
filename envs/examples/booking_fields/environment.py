"""Pick the fields of a booking out of a message, as JSON.

1,000 messages, all different: a person asks for a table, a room or a lesson, in one of many
wordings. The held-out ones are by other people about other days and times, and a quarter of them
use wordings that no training row has. Only the exact object counts: the right keys and values and
nothing around it. A general language model without training writes something else nearly always.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

from envs import Score, SingleTurnEnv, Task

NAMES = (
    "Maria Lopez,Tom Becker,Aisha Khan,John Miller,Li Wei,Anna Novak,Peter Jensen,Sara Cohen,"
    "David Okoro,Emma Rossi,Lucas Martin,Nina Petrova,Omar Hassan,Julia Weber,Ben Carter,"
    "Chloe Dubois,Ivan Horvat,Mei Tanaka,Paul Adams,Rosa Silva,Hugo Lind,Ella Brown,Sam Reed,"
    "Yara Haddad,Felix Kraus,Grace Kim,Noah Evans,Olga Ivanova,Ravi Patel,Zoe Clark"
).split(",")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
HOURS = (
    "8 am",
    "9 am",
    "10 am",
    "11 am",
    "noon",
    "1 pm",
    "2 pm",
    "3 pm",
    "5 pm",
    "6 pm",
    "7 pm",
    "8 pm",
)
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
THINGS = {
    "table": ("a table", "a table by the window", "one of your tables"),
    "room": ("a meeting room", "a room", "one of your rooms"),
    "lesson": ("a tennis lesson", "a lesson", "a swimming lesson"),
}
WORDINGS = (
    "Hi, this is {name}. I'd like to book {thing} for {people} on {day} at {time}.",
    "Hello, {name} here, could we have {thing} on {day} at {time}? There will be {people} of us.",
    "Please reserve {thing} for {day}, {time}, {people} people, under the name {name}.",
    "Good morning! My name is {name} and we need {thing} for {people} people this {day} at {time}.",
    "{name} speaking. Is {thing} free on {day}? We are {people} and would come at {time}.",
    "We are a group of {people} and want {thing} at {time} on {day}. Regards, {name}",
    "Can I get {thing} on {day} for {people} people? Around {time} would be great. Thanks, {name}",
    "Booking request: {thing}, {day} {time}, {people} guests, contact {name}.",
)
UNSEEN_WORDINGS = (
    "It's {name} again. {day} at {time} would suit all {people} of us, so please keep {thing}.",
    "Do you still have {thing} at {time} on {day}? {people} people. Best wishes, {name}.",
    "For {people} people we would like {thing}; {name} will be there on {day} from {time}.",
)
QUESTION = (
    "Read the message and answer only with JSON with the keys name, what (table, room or lesson), "
    "day, time and people (a number).\n\nMessage: {message}"
)


class BookingFields(SingleTurnEnv):
    """`train_tasks` messages to learn from and `heldout_tasks` others."""

    def __init__(self, train_tasks: int, heldout_tasks: int, seed: int) -> None:
        self.train_tasks = train_tasks
        self.heldout_tasks = heldout_tasks
        self.seed = seed

    def tasks(self) -> list[Task]:
        rng = random.Random(self.seed)
        appointments = [(what, day, hour) for what in THINGS for day in DAYS for hour in HOURS]
        rng.shuffle(appointments)
        ours = len(appointments) * self.heldout_tasks // (self.train_tasks + self.heldout_tasks)
        seen: set[str] = set()
        tasks = []
        for index in range(self.train_tasks + self.heldout_tasks):
            heldout = index < self.heldout_tasks
            wordings = UNSEEN_WORDINGS if heldout and index % 4 == 0 else WORDINGS
            # Nobody and no appointment stands in both halves.
            names = NAMES[::3] if heldout else [name for name in NAMES if name not in NAMES[::3]]
            free = appointments[:ours] if heldout else appointments[ours:]
            message, fields = self._draw(rng, wordings, names, free)
            while message in seen:
                message, fields = self._draw(rng, wordings, names, free)
            seen.add(message)
            tasks.append(
                Task(
                    id=f"booking-{index}",
                    prompt=QUESTION.format(message=message),
                    answer=json.dumps(fields),
                    split="heldout" if heldout else "train",
                    metadata={"wording": "unseen" if wordings is UNSEEN_WORDINGS else "seen"},
                )
            )
        return tasks

    def _draw(
        self,
        rng: random.Random,
        wordings: Sequence[str],
        names: Sequence[str],
        appointments: Sequence[tuple[str, str, str]],
    ) -> tuple[str, dict[str, Any]]:
        """A message in one of the wordings, and the fields that stand in it."""
        people = rng.randint(2, 10)
        what, day, hour = rng.choice(appointments)
        fields = {
            "name": rng.choice(names),
            "what": what,
            "day": day,
            "time": hour,
            "people": people,
        }
        thing = rng.choice(THINGS[what])
        written = str(people) if rng.random() < 0.5 else NUMBERS[people - 1]
        message = rng.choice(wordings).format(**(fields | {"thing": thing, "people": written}))
        return message[0].upper() + message[1:], fields

    def score(self, task: Task, completion: str) -> Score:
        """1 for exactly the object; else up to 0.4 for the share of fields that are right."""
        wanted = json.loads(str(task.answer))
        try:
            given = json.loads(completion)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return Score(0.0, success=False, metrics={"json": 0.0, "fields": 0.0})
        right = sum(given.get(key) == value for key, value in wanted.items()) / len(wanted)
        exact = given == wanted
        return Score(
            1.0 if exact else 0.4 * right, success=exact, metrics={"json": 1.0, "fields": right}
        )


def load_environment(
    train_tasks: int = 600, heldout_tasks: int = 400, seed: int = 1000
) -> BookingFields:
    """1,000 messages; every number can be set in environment.toml."""
    return BookingFields(train_tasks, heldout_tasks, seed)
