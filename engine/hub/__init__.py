"""Fetches files from a hub of models and datasets over HTTP; names and layout are those of
`huggingface_hub`. Start reading at `repository.newest_version`. What makes a repository a model is
decided in `engine/models/hub.py`.

    benchmarks.py  known benchmarks by name: a dataset and the environment that scores it
    client.py      the connection, and its errors as refusals
    data.py        a dataset by its id, as a folder of data files
    repository.py  one version of a repository: which files it has, fetching them
"""
