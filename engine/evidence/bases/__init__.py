"""Is the model under a run the one that its name says? Weights are told apart by their SHA-256.
Start with `bases.py`.

    bases.py       which weights lay under a model, and whether they are still there
    lookalikes.py  models for which a base may be taken, by its name or its looks
"""
