"""What base models can do before they are trained here: the questions that show it (a battery),
and others of the same skills that may be trained. No torch. Start with `batteries.py`.

    batteries.py          which questions a base model is asked, and which it may practise
    card.py               what is asked, how it is judged and what it can show, for people
    drawn.py              questions drawn from word lists: copying, sums, JSON, lists, instructions
    language.py           what every base but pebble is asked
    language_practice.py  other questions of the same skills, which may be trained
    pebble.py             what pebble is taught
    question.py           a question, and how a reply to it is judged
"""
