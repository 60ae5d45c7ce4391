"""A base model with its adapter as training and sampling see it, our own and through transformers.
Start with `policy.py`, then `network.py`.
"""
