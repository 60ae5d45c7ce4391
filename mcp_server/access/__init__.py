"""Who may call and what is written of it: tokens, keys, quotas, rates, the audit log. Used by every
door; start with `keys.py`.
"""
