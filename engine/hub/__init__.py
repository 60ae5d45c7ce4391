"""Files of a hub of models and datasets, over HTTP, as `huggingface_hub` names and lays them out.
Start reading at `repository.newest_version`; what makes a repository a model is decided in
`engine/models/hub.py`.

    benchmarks.py  known benchmarks by name: a dataset and the environment that scores it
    client.py      the connection, and its errors as refusals
    data.py        a dataset by its id, as a folder of data files
    repository.py  one version of a repository: which files it has, fetching them
"""
