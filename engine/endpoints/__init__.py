"""Models behind a URL, asked over OpenAI's chat API: any model as a baseline, a teacher or a judge.
No torch. Start with `play.py`.

    chat_client.py  one request: its form, its retries, what came back
    answered.py     what was answered so far, also before an interruption, and what may be spent
    metered.py      one turn asked once, within the caps of the run
    checks.py       what a model behind a URL cannot be asked
    judges.py       judges by name, asked in an env process and outside of one
    play.py         tasks of an environment played and scored, as rows of an evaluation
    references.py   `openai:NAME`: the endpoint that is meant, its key, its prices
"""
