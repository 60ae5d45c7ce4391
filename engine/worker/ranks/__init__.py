"""One run in several processes, a rank each, with a device each. Rank 0 is the trainer, and the
only one that knows the run: it reads tasks, scores answers, evaluates and writes files. The others
hold the same model and do what it tells them: sample their share of the completions, compute the
gradients of their share of a batch, and the same optimizer step. Gradients are added up by one
all-reduce per step. With `async_sampling` some ranks do nothing but sample, beside training; with
`shard_base` each holds only a part of the base. Start with `leader.py`; what another rank runs is
engine/worker/helper.

    collective.py      tensors between ranks: gradients added up, weights handed on (gloo, nccl)
    leader.py          rank 0's side: starts the others, tells them what to do, sees one die
    lockstep.py        passes through a sharded base, as many on every rank
    messages.py        what ranks tell each other, over a pair of sockets for each
    parts.py           a rank's part of a batch, for each kind of pass
    shared_pass.py     a pass over a batch by all ranks
    sharding.py        a base whose layers are cut over the ranks (FSDP2)
    shared_sampler.py  a sampler that samples on several ranks
    shares.py          a batch cut into parts of about equal work
"""
