"""The model: plain modules, which know nothing of ranks.

llama.py       Llama and Qwen3: attention, feed-forward, block, head; counts of parameters and FLOPs
attention.py   attention kernels and masks
loss.py        cross entropy, in chunks of tokens
init.py        initial values of parameters and buffers
build.py       builds the model of a configuration: adds adapters, freezes parameters
"""
