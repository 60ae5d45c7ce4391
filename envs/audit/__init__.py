"""What a scorer pays for answers that are none, and whether it pays twice the same. Start with
`reward_audit.py`.
"""
