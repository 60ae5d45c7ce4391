"""The training side of the engine, and the only place with torch. It is started as `python -m
engine.worker` and imported by nobody. Start with `grpo.py`, `sft.py`, `dpo.py` or `distill.py`,
each a training loop from top to bottom.

    __main__.py      one run, one process: dispatch, exit status, failure record
    components.py    base, renderer, environment, sampler, made ready
    distill.py       on-policy distillation, top to bottom
    dpo.py           direct preference optimisation, top to bottom
    evaluate.py      evaluations, probes, searches for a prompt
    grpo.py          group relative policy optimisation, top to bottom
    manifest.py      what was trained on what, with what
    probe_speed.py   how fast this machine is
    sft.py           supervised fine-tuning, top to bottom
    teacher_endpoint.py  a teacher behind an OpenAI-compatible server
    teachers.py      the teacher of a distillation, a model in this process
    training.py      what the loops share around their steps
"""
