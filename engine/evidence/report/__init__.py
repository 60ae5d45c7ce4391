"""The report of a run as HTML, Markdown and a model card. Start with `dossier.py`, which gathers
what is known. `outcome.py`, `progress.py` and `origins.py` build sections from it, and
`html_report.py` and `markdown.py` render them.

    blocks.py       what a section consists of, whatever renders it
    charts.py       curves as SVG
    dossier.py      everything a report says about a run, gathered once
    html_report.py  the sections as one HTML file that opens anywhere
    markdown.py     the same as Markdown, and the model card
    other_words.py  the sections on the same tasks in other words, and on prompts that were tried
    origins.py      sections on reward, rows, cost, settings, lineage, hashes
    outcome.py      sections on the verdict, the models, tasks and skills
    progress.py     the section on curves
    results_table.py  every answer as a row of CSV or parquet
    report.html.j2  the page: each kind of block as a macro
    stacked.py      groups by kind over the steps, as SVG
    values.py       numbers and settings as text
"""
