"""Pages of a run for a reader: logs, rollouts, transcripts, a preview of training rows. Start with
`logs.py` and `rollouts.py`.

    changed_answers.py  the same held-out tasks before and after
    cursors.py          where a page of a log begins
    logs.py             metrics, events, console, error, a page at a time
    metrics_pages.py    curves as a whole; steps since the last page
    preview.py          one SFT row as it is trained: text, loss mask, where it is cut
    rollout_groups.py   whole groups of rollouts
    rollout_pages.py    a call of read_rollouts: arguments, cursor, what fits
    rollout_rows.py     which rows of a run are read, filtered, ordered
    rollouts.py         pages of rollouts and answers, with their scores
    search.py           the plain search of `grep`
    text_pages.py       events, console and error as pages
    transcripts.py      conversations within a number of characters
"""
