"""Whether it worked: judgements made from a run's files, without a model. Start with
`verdict/verdict.py`.

    base_card.py  a base model: what it can do and in which words
"""
