"""What is computed: plain modules, which know nothing of ranks.

llama.py       Llama and Qwen3: attention, feed-forward, block, head; parameters and FLOPs counted
attention.py   attention's kernels and masks
loss.py        cross entropy, in chunks of tokens
init.py        how parameters and buffers begin
build.py       the model of a configuration: adapters added, frozen parameters marked
"""
