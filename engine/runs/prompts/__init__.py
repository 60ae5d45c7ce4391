"""A better prompt instead of better weights: algorithm="prompt". No torch. Start with `job.py`.

asking.py      a search of a model behind a URL, as a process of its own
checks.py      whether a search can be made: gepa, the endpoint, the tasks, the budget
choices.py     every setting of a search, with its source
feedback.py    what the endpoint is shown of an answer
job.py         a search from its exam before to its exam after, whoever samples
reflection.py  the endpoint that writes prompts, within the caps of the run
search.py      the library gepa, given our rollouts, scores and endpoint
submit.py      queuing a search; its checks and its estimate
tasks.py       which tasks are reflected on, and which choose among prompts
versions.py    an environment version of the prompt that was chosen
"""
