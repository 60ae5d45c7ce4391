"""One function per verb and the form of every reply, shared by tools and command line. Start with
`verbs.py`.
"""
