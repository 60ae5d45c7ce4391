"""What groups of answers to one task give GRPO to learn from: the kinds of groups, counted at every
step of a run and before and after a new reward. Start with `kinds.py`.

    kinds.py    do the rewards of a group differ, and if not, why not
    preview.py  what a new reward would have made of the groups that a run stored
"""
