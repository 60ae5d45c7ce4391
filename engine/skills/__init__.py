"""What base models can do before they are trained here: the questions that show it (a battery), and
other questions of the same skills that may be trained (practice). No torch. Start with
`batteries.py`.

    batteries.py          which questions a base model is asked, and which it may practise
    card.py               a page for people: what is asked, how it is judged, what it can show
    drawn.py              questions drawn from word lists: copying, sums, JSON, lists, instructions
    language.py           what every base model except pebble is asked
    language_practice.py  other questions of the same skills, which may be trained
    pebble.py             what pebble, the built-in base model, is taught
    question.py           a question, and how a reply to it is judged
"""
