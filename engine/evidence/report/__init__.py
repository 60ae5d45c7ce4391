"""The report of a run as HTML, Markdown and a model card. Start with `dossier.py`, which gathers
what the others show.
"""
