"""How the model is parallelized. Read parallelize.py first: it applies everything in order. train()
then calls materialize() and verify().

parallelize.py             the order of the steps, and the reason for it
mesh.py                    the device mesh: which ranks replicate, shard, split sequences and matrices
fsdp.py                    FSDP2: units, mixed precision, resharding, prefetch
materialize.py             from the meta device to each rank's shards
verify.py                  checks of sharding, optimizer and hooks; of replicas at each save
activation_checkpoint.py   what backward recomputes
tensor.py                  tensor parallelism: along which dimension each matrix is sharded
context.py                 context parallelism: attention over sharded sequences
collectives.py             differentiable collectives for tensor.py and context.py
replicated.py              frozen parameters that every rank stores in full
memory_pool.py             FSDP2's buffers in the computing stream's memory pool
random_numbers.py          seeds of the random generators
ranks.py                   how ranks agree: gathered objects, errors that all ranks raise
torch_patches.py           workarounds for torch
"""
