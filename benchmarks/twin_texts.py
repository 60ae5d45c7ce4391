"""Texts of `twins.py`: three generators whose templates are written twice, and synonyms.

A template is two wordings of one task with the same slots: `{a}` to `{d}` are numbers, the others
are drawn from the words below.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_SLOT = re.compile(r"\{(\w+)\}")
_NUMBERS = "abcd"

WORDS: Mapping[str, Sequence[str]] = {
    "name": (
        "Amina Boris Chiara Dmitri Elif Farid Greta Hiro Imani Jonas Katya Leila Mateo Nadia Oskar "
        "Priya Quentin Rosa Samir Tove Umar Vera Wanjiru Xenia Yusuf Zofia Anders Bianca Caspar "
        "Dalia"
    ).split(),
    "thing": (
        "apples marbles stamps lemons candles shells buttons ribbons pencils tickets balloons "
        "cookies stickers bricks tulips coins magnets postcards walnuts beads"
    ).split(),
    "place": (
        "bakery library harbour museum school garden factory market workshop station theatre farm "
        "chapel stadium hospital"
    ).split(),
    "city": (
        "Lima Oslo Cairo Hanoi Quito Dakar Bern Riga Accra Perth Turin Malmo Izmir Lagos Kyoto "
        "Porto Zadar Tunis Leeds Graz"
    ).split(),
    "job": (
        "baker surgeon welder pilot tailor botanist plumber violinist cartographer judge farmer "
        "glazier dentist editor carpenter"
    ).split(),
    "colour": "red green blue yellow violet orange brown white black grey".split(),
    "animal": "heron otter badger lynx falcon beaver raven marten stork weasel".split(),
    "field": (
        "price weight rating age stock height score distance duration brightness width depth "
        "volume "
        "priority temperature pressure humidity latency salary mileage deposit balance quota "
        "discount "
        "voltage altitude frequency capacity warranty deadline"
    ).split(),
    "kind": (
        "orders sensors invoices planets players flights recipes shipments patients books vehicles "
        "messages servers parcels tenants students lessons bridges pumps songs auctions tunnels "
        "ferries grants samples tickets"
    ).split(),
    "verb": "collect compute select list derive gather".split(),
}

WORD_PROBLEMS = (
    (
        "{name} has {a} {thing} and buys {b} more at the {place}. How many {thing} does she have?",
        "After a trip to the {place}, where {b} {thing} were added to the {a} already owned by "
        "{name}, what is the new total of {thing}?",
    ),
    (
        "A {place} sells {a} {thing} on Monday and {b} on Tuesday. If {c} are returned, how many "
        "were kept by customers?",
        "Customers returned {c} of the {thing} they got from the {place}, which had sold {a} of "
        "them on Monday and {b} on Tuesday. What number stayed with them?",
    ),
    (
        "{name} packs {a} boxes with {b} {thing} in each of them and gives away {c}. How many "
        "{thing} are left?",
        "Boxes filled by {name} hold {b} {thing}; there are {a} boxes. Once {c} {thing} have been "
        "handed out, what remains?",
    ),
    (
        "The train to {city} leaves with {a} people. At the first stop {b} get off and {c} get on. "
        "How many people arrive in {city}?",
        "Heading for {city}, a train starts with {a} aboard; {b} leave it and {c} join it on the "
        "way. Tell me the passengers that reach {city}.",
    ),
    (
        "{name} reads {a} pages on each day of a week and {b} pages on the Sunday after it. How "
        "long is the book, if {c} pages are left?",
        "With {c} pages still unread, after seven days at {a} pages and one Sunday at {b}, what "
        "length has the book of {name}?",
    ),
    (
        "In a {place} there are {a} rows of {b} chairs. If {c} of the chairs are broken, how many "
        "people can sit down?",
        "Seats of a {place} stand in {a} rows, {b} to a row; {c} seats cannot be used. Find the "
        "greatest audience.",
    ),
    (
        "{name} earns {a} coins an hour as a {job} and works {b} hours. Rent takes {c} coins. What "
        "is left of the pay?",
        "Working {b} hours as a {job}, {name} is paid {a} coins hourly, then hands {c} coins to a "
        "landlord. Which amount stays?",
    ),
    (
        "A tank in the {place} holds {a} litres. It loses {b} litres every hour for {c} hours. How "
        "many litres does it hold then?",
        "For {c} hours a tank at the {place}, full with {a} litres, leaks {b} litres hourly. State "
        "the litres that stay inside.",
    ),
    (
        "{name} drives {a} kilometres to {city} and then {b} kilometres farther. The car needs {c} "
        "litres for it. What distance did the car go?",
        "Via {city}, at {a} kilometres, {name} goes on for another {b}, burning {c} litres of "
        "fuel. "
        "Give the whole distance of the journey.",
    ),
    (
        "There were {a} {colour} {thing} in a bag, and {b} of them fell out. Then {name} put "
        "in {c}. "
        "How many are in the bag?",
        "{name} dropped {c} {thing} into a bag that had lost {b} of its {a} {colour} ones. What "
        "count does the bag have?",
    ),
    (
        "Each of the {a} tables at the {place} needs {b} {thing}, and there are {c} already. How "
        "many more must {name} bring?",
        "{name} decorates {a} tables for the {place}, {b} {thing} per table. With {c} at hand, "
        "which number is missing?",
    ),
    (
        "A {job} in {city} mends {a} shoes in a month, {b} in the next and {c} in the third. What "
        "is that in all?",
        "Three months of mending by a {job} from {city} gave {a}, {b} and {c} shoes. Add them.",
    ),
)

PEOPLE = (
    (
        "{name} was born in {city} and became a {job}. Her pet is a {colour} {animal}. What does "
        "{name} do for a living?",
        "Name the profession of {name}, a native of {city}, owner of a {animal} that is {colour}, "
        "who took up work as a {job}.",
    ),
    (
        "In {city} lives a {job} called {name} with a {animal}. The {animal} is {colour}. In which "
        "city does the {animal} live?",
        "A {colour} {animal} belongs to {name}, {job} by trade, resident of {city}. Where is its "
        "home?",
    ),
    (
        "When {name} left {city}, the {job} sold the {colour} house to a collector of {thing}. Who "
        "sold a house?",
        "A collector of {thing} bought a house, painted {colour}, from {name} the {job}, who moved "
        "away from {city}. Identify the seller.",
    ),
    (
        "The {colour} door of the {place} was painted by {name}, who is a {job} from {city}. Which "
        "colour has the door?",
        "{name}, {job} of {city}, did the paint of a {place} door: {colour}. Say how the door "
        "looks.",
    ),
    (
        "Every spring a {animal} visits the {place} in {city}, and {name} feeds it {thing}. "
        "What is "
        "it fed with?",
        "{thing} are given by {name} to a {animal} coming yearly to a {place} of {city}. Name the "
        "food.",
    ),
    (
        "Because the {job} was ill, {name} guarded the {place} of {city} and saw a {animal} there. "
        "What was seen by {name}?",
        "Standing in for a sick {job}, {name} watched over a {city} {place}. An animal came: a "
        "{animal}. Which animal?",
    ),
    (
        "{name} wrote a novel about a {colour} {animal} which lives under the {place} of {city}. "
        "Under what does it live?",
        "A {city} {place} hides, in the novel by {name}, a {animal} coloured {colour} beneath it. "
        "Beneath what?",
    ),
    (
        "Though {name} collects {thing}, her brother in {city}, a {job}, would rather have a "
        "{animal}. What would he rather have?",
        "A {animal} is the wish of a {job} from {city}; his sister {name} gathers {thing}. State "
        "his wish.",
    ),
)

FUNCTIONS = (
    (
        "Write a function that takes a list of {kind} and returns those whose {field} is "
        "above {a}, "
        "sorted by {field2}.",
        "Given {kind}, keep every one with {field} greater than {a}; order by {field2}. "
        "Provide the "
        "code as a function.",
    ),
    (
        "Implement a class for {kind} that counts how often {field} was changed and raises an "
        "error "
        "after {a} changes of {field2}.",
        "Changes of {field} shall be counted in your {kind} class, with an exception once {field2} "
        "got {a} changes.",
    ),
    (
        "Given two files of {kind}, print the ids that are in both but differ in {field} by more "
        "than {a} or in {field2}.",
        "Compare {kind} from two files: output ids found twice where {field} deviates over {a}, or "
        "{field2} does at all.",
    ),
    (
        "Group the {kind} by {field} and for each group show the {a} with the largest {field2}.",
        "Per {field}, report the top {a} {kind} in terms of {field2}.",
    ),
    (
        "Make a cache of {kind} that forgets an entry when its {field} is older than {a} seconds, "
        "unless {field2} is pinned.",
        "Entries of a {kind} cache expire {a} seconds past their {field}; pinned {field2} protects "
        "them. Build it.",
    ),
    (
        "Parse lines with {field} and {field2} of {kind}, skip the first {a} lines, and return a "
        "dictionary from one to the other.",
        "Ignoring {a} leading lines, read {kind} from text into a mapping of {field} onto "
        "{field2}.",
    ),
    (
        "Find all {kind} whose {field} was below {a} for as long as their {field2} did not move.",
        "Which {kind} kept {field} under {a} throughout a constant {field2}? Search for them.",
    ),
    (
        "Plot the {field} of {kind} against {field2} with {a} bins and label what is out of range.",
        "Draw {kind}: {field2} on one axis, {field} on the other, {a} bins, outliers labelled.",
    ),
)


@dataclass(frozen=True)
class Item:
    """A task, its answer, and the template and slots it was made of."""

    question: str
    answer: str = ""
    template: int = 0
    slots: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Generator:
    """Templates written twice, and what answers them."""

    wordings: Sequence[tuple[str, str]]
    answer: Callable[[Mapping[str, str]], str]

    @property
    def has_numbers(self) -> bool:
        """Whether its tasks have numbers."""
        return any(slot in _NUMBERS for slot in _SLOT.findall(self.wordings[0][0]))

    @property
    def templates(self) -> int:
        """How many there are."""
        return len(self.wordings)

    def draw(self, rng: random.Random, template: int) -> Item:
        """A task in the first wording of a template."""
        slots: dict[str, str] = {}
        for name in _SLOT.findall(self.wordings[template][0]):
            while name not in slots or list(slots.values()).count(slots[name]) > 1:
                slots[name] = _drawn(name, rng)
        return self._item(template, slots, 0)

    def in_other_words(self, item: Item) -> Item:
        """The same task in the second wording."""
        return self._item(item.template, item.slots, 1)

    def with_other_numbers(self, item: Item, rng: random.Random) -> Item:
        """The task with its numbers drawn anew."""
        slots = {
            name: _drawn(name, rng) if name in _NUMBERS else word
            for name, word in item.slots.items()
        }
        return self._item(item.template, slots, 0)

    def _item(self, template: int, slots: Mapping[str, str], wording: int) -> Item:
        text = self.wordings[template][wording].format(**slots)
        return Item(text[0].upper() + text[1:], self.answer(slots), template, slots)


def _drawn(slot: str, rng: random.Random) -> str:
    if slot in _NUMBERS:
        return str(rng.randint(2, 90))
    return rng.choice(WORDS[slot.rstrip("2")])


def _number(slots: Mapping[str, str]) -> str:
    """A number that hangs on the numbers of a task; which one is of no matter here."""
    a, b, c = (int(slots.get(name, 7)) for name in "abc")
    return str(abs(a * b - c))


GENERATORS: Mapping[str, Generator] = {
    "word problems": Generator(WORD_PROBLEMS, _number),
    "people": Generator(PEOPLE, lambda slots: slots.get("job") or slots["animal"]),
    "functions": Generator(FUNCTIONS, lambda slots: ""),
}

_PAIRS = (
    "= buys=purchases bought=purchased buy=purchase has=owns total=overall house=home "
    "combined=joint sort=order order=sequence numbers=values number=value count=tally "
    "determine=establish find=identify calculate=compute following=subsequent "
    "problem=exercise answer=reply final=last give=supply state=name list=series "
    "words=terms word=term letters=characters letter=character begin=start began=started "
    "ended=finished end=finish started=commenced completed=finished operation=procedure "
    "duration=length spell=write backward=reversed reverse=flip consider=regard "
    "statements=claims logically=necessarily follow=result child=kid called=named "
    "married=wedded relation=kinship respond=reply only=just describes=denotes legs=limbs "
    "animals=creatures people=persons man=guy woman=lady many=numerous large=big "
    "small=little arithmetic=numerical equation=formula solve=resolve simplify=reduce "
    "expression=term day=date days=dates money=cash price=cost costs=charges spends=pays "
    "gets=receives makes=produces each=every also=too after=following before=ahead "
    "store=shop remaining=leftover left=remaining coin=token heads=face probability=chance "
    "possible=feasible finish=complete courses=classes course=class "
    "prerequisites=requirements given=provided single=one ascending=increasing "
    "descending=decreasing common=shared divisor=factor greatest=largest least=smallest "
    "multiple=product digits=figures true=right false=wrong always=ever group=cluster "
    "task=job your=the please=kindly need=require needs=requires siblings=brethren "
    "sister=sibling brothers=male-siblings"
)
SYNONYMS: Mapping[str, str] = {
    word: other for word, _, other in (pair.partition("=") for pair in _PAIRS.split())
}
