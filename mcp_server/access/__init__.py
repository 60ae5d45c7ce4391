"""Who may call and what is written of it: tokens, keys, quotas, rates, the audit log. Used by every
door; start with `keys.py`.

    audit_log.py  one line for every call that changes something
    bearer.py     the token file
    keys.py       further tokens: names, scopes, quotas; digests only
    ledger.py     what keys and projects have spent
    log.py        where tracebacks go
    quotas.py     what a key may still start
    rate.py       how often a key may call
    sessions.py   how many sessions a key has open
    sharing.py    what a key lets others see
    viewing.py    for whom the home is opened during a call
"""
