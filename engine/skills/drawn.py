"""Questions drawn from word lists: copying, sums, writing and reading JSON, lists, and short
instructions. No torch.

Each skill has two sides, "asked" (the battery) and "practice" (what may be trained). No word, pair
of numbers or topic of one side is on the other, so a practised answer is never an asked one. The
lists are everyday words, written for this package and under its licence.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from engine.skills.question import Question

Side = Literal["asked", "practice"]
ASKED, PRACTISED = 12, 24  # questions per skill on each side

# The first half of every list is for questions that are asked, the rest for practice.
NAMES = (
    "Anna Ben Clara David Emma Frank Grace Henry Ivy Jack Kate Leo Mary Noah Olga Paul Ruth Sam "
    "Tom Vera Walter Nina Oscar Lucy"
).split()
NOUNS = (
    "river stone garden window bread candle bridge forest mountain table letter bottle basket "
    "hammer island carpet pencil mirror ladder blanket button kettle pillow shovel tower engine "
    "ticket wallet jacket orange"
).split()
ANIMALS = "fox dog cat horse bird bear wolf rabbit goat lion frog duck".split()
ADJECTIVES = "red old small quiet heavy bright cold soft round young green happy".split()
VERBS = "sleeps runs sings waits jumps eats stands hides walks plays rests sits".split()
PLACES = (
    "in the garden,near the river,under the bridge,on the hill,by the window,behind the house,"
    "at the market,in the snow,on the roof,by the fire,in the field,near the lake"
).split(",")
# "Name three ...": the topics, with the words that are accepted; the first four topics are asked.
TOPICS = {
    "animals": "dog cat horse cow pig sheep lion tiger bear elephant monkey wolf fox rabbit bird "
    "fish dogs cats lions tigers elephants birds giraffe zebra cheetah dolphin penguin eagle owl",
    "colors": "red blue green yellow black white orange purple pink brown gray grey violet",
    "fruits": "apple apples banana bananas orange oranges grape grapes pear pears mango mangoes "
    "strawberry strawberries blueberries peach peaches cherry cherries pineapple lemon kiwi",
    "countries": "france germany italy spain china japan india canada mexico brazil russia england "
    "egypt australia greece kenya norway sweden states kingdom",
    "vegetables": "carrot carrots potato potatoes onion onions tomato tomatoes broccoli spinach "
    "cabbage lettuce peas corn beans pepper peppers cucumber cauliflower",
    "drinks": "water tea coffee milk juice beer wine lemonade soda cola",
    "sports": "soccer football tennis basketball baseball hockey golf swimming volleyball cricket",
    "tools": "hammer saw screwdriver drill wrench pliers knife shovel axe rake hammers saws ruler",
    "flowers": "rose roses tulip tulips lily lilies daisy daisies sunflower sunflowers orchid "
    "orchids violet lavender",
    "insects": "ant ants bee bees butterfly butterflies fly flies beetle beetles moth moths wasp "
    "wasps mosquito mosquitoes grasshopper dragonfly ladybug",
    "instruments": "piano guitar violin drum drums flute trumpet cello saxophone harp clarinet",
    "clothes": "shirt shirts pants dress dresses hat hats coat jacket shoes socks skirt jeans "
    "gloves scarf sweater",
}
_ASKED_TOPICS = 4


def questions(side: Side) -> tuple[Question, ...]:
    """Return all questions of a side, skill by skill; they are the same in every run. "asked" are
    the questions that measure a model, ASKED of each skill; "practice" are those that it may be
    trained on, PRACTISED of each skill."""
    count = ASKED if side == "asked" else PRACTISED
    drawn: list[Question] = []
    for skill, draw in _DRAWS.items():
        by_text: dict[str, Question] = {}  # by text, so that no question comes twice
        endless_questions = draw(random.Random(f"{skill}-{side}"), side)
        while len(by_text) < count:
            question = next(endless_questions)
            by_text.setdefault(question.text, question)
        drawn += by_text.values()
    return tuple(drawn)


def of_side(words: Sequence[str], side: Side) -> Sequence[str]:
    """Return the part of a word list that a side's questions may use: the first half for "asked",
    the second for "practice". So the two sides share no word."""
    half = len(words) // 2
    return words[:half] if side == "asked" else words[half:]


def _copying(rng: random.Random, side: Side) -> Iterator[Question]:
    """Yield without end requests to repeat a sentence of drawn words, such as "The red fox sleeps
    in the garden."."""
    while True:
        subject = f"{rng.choice(of_side(ADJECTIVES, side))} {rng.choice(of_side(ANIMALS, side))}"
        predicate = f"{rng.choice(of_side(VERBS, side))} {rng.choice(of_side(PLACES, side))}"
        yield Question(
            "copying",
            f"Repeat this sentence: The {subject} {predicate}.",
            (f"the {subject} {predicate}",),
            check="phrases",
        )


def _arithmetic(rng: random.Random, side: Side) -> Iterator[Question]:
    """Yield the sums of all pairs of digits from 1 to 9 that belong to this side, each pair once.

    Of the 45 pairs, `ASKED` are asked and the rest practised.
    """
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    random.Random("pairs").shuffle(pairs)  # one seed for both sides, so that they share no pair
    pairs_of_side = pairs[:ASKED] if side == "asked" else pairs[ASKED:]
    for pair in pairs_of_side:
        a, b = rng.sample(pair, 2)  # in either order
        yield Question("arithmetic", f"What is {a} + {b}? Answer with a number.", (str(a + b),))


def _json(rng: random.Random, side: Side) -> Iterator[Question]:
    """Yield without end requests to write a sentence as a JSON object with the keys name and
    age."""
    while True:
        name, age = rng.choice(of_side(NAMES, side)), rng.randint(5, 80)
        yield Question(
            "JSON",
            'Write this as a JSON object with the keys "name" and "age": '
            f"{name} is {age} years old.",
            (json.dumps({"name": name, "age": age}),),
            check="json",
        )


def _reading_json(rng: random.Random, side: Side) -> Iterator[Question]:
    """Yield without end questions for the value of a key in a JSON object. The values of the other
    keys are wrong answers."""
    while True:
        values = {
            "name": rng.choice(of_side(NAMES, side)),
            "age": str(rng.randint(5, 80)),
            "pet": rng.choice(of_side(ANIMALS, side)),
        }
        key = rng.choice(list(values))
        other_values = (value for other_key, value in values.items() if other_key != key)
        wrong = tuple(value.lower() for value in other_values)
        text = f'What is the value of "{key}" in {json.dumps(values)}?'
        yield Question("reading JSON", text, (values[key].lower(),), wrong)


def _lists(rng: random.Random, side: Side) -> Iterator[Question]:
    """Yield without end questions for the first or the last of three words. The other two are wrong
    answers."""
    while True:
        words = rng.sample(of_side(NOUNS, side), 3)
        place, answer = rng.choice((("first", words[0]), ("last", words[-1])))
        text = f"What is the {place} word in this list: {', '.join(words)}?"
        wrong = tuple(word for word in words if word != answer)
        yield Question("lists", text, (answer,), wrong)


def _instructions(rng: random.Random, side: Side) -> Iterator[Question]:
    """Yield without end, in turn, requests to greet somebody, to write a sentence with a given
    word, and to name three things of a topic."""
    skill = "instructions"
    topics = list(TOPICS)
    topics_of_side = topics[:_ASKED_TOPICS] if side == "asked" else topics[_ASKED_TOPICS:]
    while True:
        name, noun = rng.choice(of_side(NAMES, side)), rng.choice(of_side(NOUNS, side))
        topic = rng.choice(topics_of_side)
        yield Question(skill, f"Say hello to {name}.", ("hello", name.lower()), check="phrases")
        yield Question(
            skill, f"Write one short sentence with the word {noun}.", (noun,), check="sentence"
        )
        yield Question(skill, f"Name three {topic}.", tuple(TOPICS[topic].split()), check="three")


_DRAWS: dict[str, Callable[[random.Random, Side], Iterator[Question]]] = {
    "copying": _copying,
    "arithmetic": _arithmetic,
    "JSON": _json,
    "reading JSON": _reading_json,
    "lists": _lists,
    "instructions": _instructions,
}
