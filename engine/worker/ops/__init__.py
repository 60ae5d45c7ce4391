"""Operations of our own forward: attention, packing, fused functions, matrix products. Used by
`network`; start with `kernels.py`.
"""
