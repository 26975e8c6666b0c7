"""`fivefold rehearse`: run the real step of one rank of any cluster on a machine without GPUs.

The rank runs in its own process, which sees a stand-in for the CUDA driver (`stand_in.py`, `driver/`). All else is
real: the trainer, autograd, the caching allocator, streams, FSDP, the NCCL process group, Inductor and Triton. Kernels
and collectives are counted, and never run. `changes.py` lists what it changes in fivefold, and why.
"""
