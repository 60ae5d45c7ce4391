"""Practice questions of the skills in language.py, which may be trained. No question here has the
wording or the subject of a question there. No torch.

Training replays those that the starting model answers correctly
(engine/worker/evaluation/replay.py).
"""

from engine.skills import drawn
from engine.skills.question import Question, multiple_choice, same_wording

_WRITTEN: tuple[Question, ...] = (
    *same_wording(
        "capitals",
        "What is the capital of {}?",
        "Germany: Berlin, Spain: Madrid, England: London, Russia: Moscow, China: Beijing, "
        "Greece: Athens, Portugal: Lisbon, Austria: Vienna, Poland: Warsaw, Sweden: Stockholm, "
        "Denmark: Copenhagen, Finland: Helsinki, Ireland: Dublin, Cuba: Havana, Canada: Ottawa, "
        "Belgium: Brussels, Hungary: Budapest, Thailand: Bangkok, Chile: Santiago, "
        "Kenya: Nairobi, Turkey: Ankara, Iran: Tehran, Iraq: Baghdad, South Korea: Seoul",
    ),
    *same_wording(
        "opposites",
        "What is the opposite of the word {}?",
        "up: down, left: right, day: night, good: bad, black: white, fast: slow, "
        "old: young or new, high: low, long: short, happy: sad, light: dark or heavy, wet: dry, "
        "hard: soft or easy, strong: weak, love: hate, inside: outside, true: false, "
        "first: last, clean: dirty, loud: quiet or soft, wide: narrow, thick: thin, near: far, "
        "begin: end or finish",
    ),
    *same_wording(
        "plurals",
        "What is the plural of the word {}?",
        "foot: feet, tooth: teeth, man: men, woman: women, dog: dogs, cat: cats, bus: buses, "
        "baby: babies, knife: knives, wolf: wolves, person: people or persons, book: books, "
        "dish: dishes, story: stories, car: cars, tree: trees, potato: potatoes, fox: foxes, "
        "house: houses, hero: heroes, berry: berries, shelf: shelves, match: matches, ox: oxen",
    ),
    *same_wording(
        "languages",
        "Which language do most people speak in {}?",
        "France: French, Germany: German, Italy: Italian, China: Chinese or Mandarin, "
        "Russia: Russian, England: English, Mexico: Spanish, Portugal: Portuguese, "
        "Greece: Greek, Poland: Polish, Turkey: Turkish, Sweden: Swedish, Norway: Norwegian, "
        "Denmark: Danish, Finland: Finnish, Argentina: Spanish, Cuba: Spanish, "
        "Australia: English, Ireland: English, Thailand: Thai, Vietnam: Vietnamese, "
        "Hungary: Hungarian, Israel: Hebrew, Iraq: Arabic",
    ),
    *same_wording(
        "months",
        "{}?",
        "What is the third month of the year: March, What is the fifth month of the year: May, "
        "What is the eighth month of the year: August, What is the ninth month of the year: "
        "September, What is the tenth month of the year: October, "
        "What is the eleventh month of the year: November, Which month comes after May: June, "
        "Which month comes after August: September, Which month comes after September: October, "
        "Which month comes after October: November, Which month comes before June: May, "
        "Which month comes before September: August, Which month comes before April: March, "
        "Which month comes before November: October, Which month comes after April: May, "
        "Which month comes after July: August, Which day comes after Monday: Tuesday, "
        "Which day comes after Tuesday: Wednesday, Which day comes after Thursday: Friday, "
        "Which day comes after Friday: Saturday, Which day comes before Monday: Sunday, "
        "Which day comes before Thursday: Wednesday, Which season comes after winter: spring, "
        "Which season comes after spring: summer",
    ),
    *same_wording(
        "numbers",
        "How many {}? Answer with a number.",
        "legs does a dog have: four or 4, wheels does a car have: four or 4, "
        "sides does a square have: four or 4, fingers are on one hand: five or 5, "
        "eyes does a person have: two or 2, seconds are in a minute: sixty or 60, "
        "months are in a year: twelve or 12, letters are in the English alphabet: 26, "
        "legs does an ant have: six or 6, legs does a bird have: two or 2, "
        "days are in a year: 365, wheels does a tricycle have: three or 3, "
        "arms does an octopus have: eight or 8, weeks are in a year: 52, "
        "cents are in a dollar: 100 or hundred, years are in a century: 100 or hundred, "
        "years are in a decade: ten or 10, eggs are in a dozen: twelve or 12, "
        "sides does a hexagon have: six or 6, sides does a pentagon have: five or 5, "
        "strings does a violin have: four or 4, ears does a cat have: two or 2, "
        "legs does a cow have: four or 4, seasons are in a year: four or 4",
    ),
    *multiple_choice(
        "yes or no",
        """
        Can a bird fly? yes
        Is fire cold? no
        Is water wet? yes
        Do dogs bark? yes
        Can a stone swim? no
        Is the moon larger than the earth? no
        Is London in England? yes
        Is Rome in Japan? no
        Do plants need light? yes
        Is snow black? no
        Is a cat an animal? yes
        Is a banana a fruit? yes
        Do fish have wings? no
        Is the sky blue? yes
        Is a car alive? no
        Is silver a metal? yes
        Do people have three hands? no
        Is winter warmer than summer? no
        Is a whale bigger than a mouse? yes
        Can people breathe air? yes
        Is milk black? no
        Is glass made from sand? yes
        Do horses eat grass? yes
        Is a tomato a color? no
        """,
        options=("yes", "no"),
        after="Answer yes or no.",
    ),
    *multiple_choice(
        "which of two",
        """
        Which is bigger, an elephant or a mouse? elephant / mouse
        Which is faster, a snail or a car? car / snail
        Which is hotter, the sun or the moon? sun / moon
        Which is sweeter, salt or sugar? sugar / salt
        Which is harder, a rock or a pillow? rock / pillow
        Which is a fruit, a chair or an apple? apple / chair
        Which can swim, a fish or a hammer? fish / hammer
        Which is longer, a minute or a year? year / minute
        Which is darker, night or day? night / day
        Which is older, a baby or a grandmother? grandmother / baby
        Which is a color, red or seven? red / seven
        Which is a number, green or five? five / green
        Which is softer, wool or steel? wool / steel
        Which is lighter, iron or paper? paper / iron
        Which is deeper, an ocean or a puddle? ocean / puddle
        Which is a tool, a cloud or a hammer? hammer / cloud
        Which is a metal, iron or wood? iron / wood
        Which is a drink, bread or juice? juice / bread
        Which is smaller, an ant or a whale? ant / whale
        Which is a vehicle, a spoon or a train? train / spoon
        Which is a vegetable, a carrot or a shoe? carrot / shoe
        Which is a month, Monday or May? may / monday
        Which is wetter, rain or sand? rain / sand
        Which is brighter, a lamp or a shadow? lamp / shadow
        """,
        after="Answer with one word.",
    ),
)

QUESTIONS = (*_WRITTEN, *drawn.questions("practice"))
