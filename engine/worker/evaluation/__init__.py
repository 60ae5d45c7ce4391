"""Evaluations during training: held-out tasks and earlier skills at the start, on the way and at
the end. Start with `during_training.py`.

    during_training.py  held-out tasks at step 0, on the way, at the end
    heldout.py          held-out tasks played, and the rows they leave
    heldout_loss.py     the loss of held-out conversations
    prompt_desk.py      the answers of a search for a prompt
    prior_skills.py     what the model could do before, asked at both ends
    reworded.py         the tasks of an evaluation in other words
    replay.py           rows that are trained beside the run's own, so that skills stay
    replay_rows.py      where those rows come from
"""
