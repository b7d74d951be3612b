"""How the model is parallelized. Read parallelize.py first: it calls the others, in order.

parallelize.py             the order of the steps, and the reason for each one's place
mesh.py                    which ranks replicate, shard, and split sequences and matrices
fsdp.py                    FSDP2: units, mixed precision, resharding, prefetch
materialize.py             from the meta device to each rank's shards
verify.py                  start-up checks that the model is sharded as configured
activation_checkpoint.py   what backward recomputes
tensor.py                  tensor parallelism: where each matrix is sharded
context.py                 context parallelism: attention over sharded sequences
collectives.py             differentiable collectives of the two
replicated.py              frozen parameters that every rank stores in full
memory_pool.py             FSDP2's buffers in the computing stream's memory pool
random_numbers.py          what is drawn: a function of the seed and of its purpose
ranks.py                   how ranks agree: gathered objects, errors that all raise
torch_patches.py           workarounds for versions of torch that need them
"""
