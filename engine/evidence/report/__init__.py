"""The report of a run as HTML, Markdown and a model card. Start with `dossier.py`, which gathers
what the others show.

    charts.py       curves as SVG
    dossier.py      everything a report says about a run, gathered once
    html_report.py  the report as one HTML file that opens anywhere
    markdown.py     the same as Markdown, and the model card
    report.html.j2  its page
    trust.py        its parts on trust: kept skills, audit, shared rows, seal
"""
