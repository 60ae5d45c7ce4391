"""What groups of answers to one task give GRPO to learn from. Start with `kinds.py`.

kinds.py    do the rewards of a group differ, and if not, why not
"""
