"""The reward audit: what a scorer pays for wrong and empty answers, and whether it gives one answer
the same reward twice. Start with `reward_audit.py`.

    audit_report.py   the result, as the JSON object that is stored
    audit_summary.py  the result in one line
    findings.py       what was measured so far
    full_audit.py     the audit of every row; resumes after it was killed
    groups.py         the audit of score_group
    probes.py         the answers that are tried: wrong, degenerate and odd ones
    rescore.py        answers scored once more by a process that has scored nothing else
    reward_audit.py   the audit of as many rows as fit into a time
    verdict.py        ok, warn or risk, and why
"""
