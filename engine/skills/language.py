"""What a language model can do before it is trained here: short questions in English whose answers
can be judged without a model. No torch.

They are asked of every base model except pebble. They are easy, because a skill can only be lost if
it was there: SmolLM2-135M-Instruct answers two in three. 48 are written here; 72 are drawn from
word lists (drawn.py). Together they are enough to show a loss of 5 points (see card.py).
"""

from engine.skills import drawn
from engine.skills.question import Question, multiple_choice, same_wording

_WRITTEN: tuple[Question, ...] = (
    *same_wording(
        "capitals",
        "What is the capital of {}?",
        "France: Paris, Italy: Rome, Japan: Tokyo, Egypt: Cairo, Norway: Oslo, Peru: Lima",
    ),
    *same_wording(
        "opposites",
        "What is the opposite of the word {}?",
        "hot: cold, big: small or little, early: late, rich: poor, empty: full, "
        "open: closed or close or shut",
    ),
    *same_wording(
        "plurals",
        "What is the plural of the word {}?",
        "child: children, mouse: mice, leaf: leaves, city: cities, goose: geese, box: boxes",
    ),
    *same_wording(
        "languages",
        "Which language do most people speak in {}?",
        "Spain: Spanish, Brazil: Portuguese, Japan: Japanese, Austria: German, Canada: English, "
        "Egypt: Arabic",
    ),
    *same_wording(
        "months",
        "{} month of the year?",
        "What is the first: January, What is the last: December, What is the second: February, "
        "Which holiday is in the last: Christmas, Which month comes after the sixth: July, "
        "What is the name of the fourth: April",
    ),
    *same_wording(
        "numbers",
        "How many {}? Answer with a number.",
        "days are in a week: seven or 7, legs does a spider have: eight or 8, "
        "hours are in a day: 24, wheels does a bicycle have: two or 2, "
        "sides does a triangle have: three or 3, minutes are in an hour: sixty or 60",
    ),
    *multiple_choice(
        "yes or no",
        """
        Can a fish live without water? no
        Is the sun a star? yes
        Is ice warmer than steam? no
        Is Paris in France? yes
        Do cows lay eggs? no
        Is gold a metal? yes
        """,
        options=("yes", "no"),
        after="Answer yes or no.",
    ),
    *multiple_choice(
        "which of two",
        """
        Which is colder, ice or fire? ice / fire
        Which is heavier, a feather or a stone? stone / feather
        Which is taller, a flower or a tree? tree / flower
        Which is an animal, a table or a horse? horse / table
        Which can fly, a stone or a bird? bird / stone
        Which is louder, a whisper or a shout? shout / whisper
        """,
        after="Answer with one word.",
    ),
)

QUESTIONS = (*_WRITTEN, *drawn.questions("asked"))
