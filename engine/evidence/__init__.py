"""Whether it worked: judgements made from a run's files, without a model. Start with
`verdict/verdict.py`.

    reported.py  the one number to report of a trained model
"""
