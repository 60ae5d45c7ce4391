"""Cards of base models: what they can do, in which words, and what was measured of them here. The
model card of a run is in `report/`. Start with `base_card.py`.

    base_card.py  the card of a base model as Markdown
"""
