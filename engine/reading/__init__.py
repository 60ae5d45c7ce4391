"""Pages of a run for a reader: logs, rollouts, transcripts, a preview of training rows. Start with
`logs.py`.

    logs.py         metrics, events, console, error, a page at a time
    preview.py      one SFT row as it is trained: text, loss mask, where it is cut
    rollouts.py     what the model said and what it earned
    transcripts.py  conversations within a number of characters
"""
