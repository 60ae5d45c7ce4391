"""One function per verb and the form of every reply, shared by tools and command line. Start with
`verbs.py`.

    addresses.py   what is read by its address, such as run://pebble/card
    after_wait.py  the calls to suggest after a wait
    audit_verbs.py  verbs of the command line about scorers and judges
    host_verbs.py  verbs of the command line about machines over SSH
    paths.py    paths as agents and people write them
    replies.py  the envelope, clean text, a size an agent can afford
    uploads.py  environments that come as files
    verbs.py    one function per verb, one engine call each; tools and command line share them
"""
