"""Pages of a run for a reader: logs, rollouts, transcripts, a preview of training rows. Start with
`logs.py`.
"""
