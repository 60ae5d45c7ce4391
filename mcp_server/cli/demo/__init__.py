"""`honesmith demo`: the whole loop on one base model. Start with `loop.py`.

loop.py    the calls of an agent, one after the other
plans.py   what is trained, for each base model
result.py  whether the model is better, and how that is shown
"""
