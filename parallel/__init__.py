"""How the model is parallelized. Read parallelize.py first: what is applied, in order; train() then
calls materialize() and verify().

parallelize.py             the order of the steps, and the reason for each one's place
mesh.py                    which ranks replicate, shard, and split sequences and matrices
fsdp.py                    FSDP2: units, mixed precision, resharding, prefetch
materialize.py             from the meta device to each rank's shards
verify.py                  checks of sharding, optimizer, hooks and, at each save, replicas
activation_checkpoint.py   what backward recomputes
tensor.py                  tensor parallelism: where each matrix is sharded
context.py                 context parallelism: attention over sharded sequences
collectives.py             differentiable collectives for tensor.py and context.py
replicated.py              frozen parameters that every rank stores in full
memory_pool.py             FSDP2's buffers in the computing stream's memory pool
random_numbers.py          what is drawn: a function of the seed and of its purpose
ranks.py                   how ranks agree: gathered objects, errors that all raise
torch_patches.py           workarounds for versions of torch that need them
"""
