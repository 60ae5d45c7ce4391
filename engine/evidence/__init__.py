"""Whether it worked: judgements made from a run's files, without a model. Start with
`verdict/verdict.py`.

    reported.py  the one number to report of a trained model
    target.py    what a run is expected to reach, in words and as a number
"""
