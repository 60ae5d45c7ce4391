"""What a home needs to serve a team: whose things are whose, and whose queued run starts next. Used
by engine/home; start with `owners.py`.

    fair_queue.py  the order of the queue: by what owners used lately, priorities and waiting
    owners.py      for whom a home is opened; what is shared with whom
    tables.py      the SQL of what a viewer sees, and of the queued runs that could start
"""
