"""Tasks asked in other words, by rules and a seed: for the probe of robustness (`evaluate` with
`perturb`) and for training with `vary_wording`. No torch, no user code. Start with `reword.py`.

    asked.py            what a model is shown of a task: its own words, or others
    frames.py           what stands around the question of a prompt
    kinds.py            what can be reworded, and the two stocks of words
    options.py          options of a multiple choice in another order
    prompt_texts.py     the texts by which all tasks say what to do, read and replaced
    reword.py           one task, one kind, one seed: the task in other words
    shared.py           texts that all rows of an environment share
    system_messages.py  another system message, none, or one more sentence in it
    tool_texts.py       descriptions of tools in other words and another order
"""
