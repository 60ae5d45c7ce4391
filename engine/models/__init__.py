"""What a model is: its reference, its folder, the hub, its tokens. No torch; start with
`catalog.py`.
"""
