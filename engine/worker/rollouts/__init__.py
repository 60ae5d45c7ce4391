"""From tasks to scored groups: messages to tokens, samplers, rewards to advantages. Start with
`collect.py`.
"""
