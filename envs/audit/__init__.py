"""What a scorer pays for answers that are none, and whether it pays twice the same. Start with
`reward_audit.py`.

    audit_report.py   the result, as the JSON object that is stored
    audit_summary.py  what an audit comes to, in one line
    findings.py       what was measured so far
    full_audit.py     the audit of every row, which goes on where it was killed
    groups.py         what score_group pays a group of those answers
    probes.py         those answers
    rescore.py        answers scored once more by a process that has scored nothing else
    reward_audit.py   what a scorer pays for answers that are none
    verdict.py        ok, warn or risk, and why
"""
