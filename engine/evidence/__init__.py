"""Whether it worked: judgements made from a run's files, without a model. Start with
`verdict/verdict.py`.
"""
