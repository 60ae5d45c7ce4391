"""Operations of our own forward: attention, packing, fused functions, matrix products. Used by
`network`; start with `kernels.py`.

    attention.py  attention over packed sequences
    causal.py     attention of short sequences by blocks, for CPUs
    compiled.py   those functions as formulas for torch.compile
    flash3.py     FlashAttention 3 in place of 2, for GPUs that have it
    fused_ops.py  what stands between the products: which set of functions, tried first
    kernels.py    the forward's autograd nodes, backward written out
    liger.py      those functions on Liger's Triton kernels, for GPUs
    low_rank.py   the part of an adapter in a layer, by parts or in one product
    matmul.py     matrix products on the fastest library there is
    norms.py      RMS norms with their gradients
    packing.py    sequences end to end, a group's prompt once
"""
