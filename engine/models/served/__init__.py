"""A model of this home as a judge: which one is meant, and where a deployment answers for it.

judge.py  `model:REF`: the model, its fingerprint, its memory, its address
"""
