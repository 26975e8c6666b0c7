"""`fivefold rehearse`: the real step of one rank of any cluster, on a machine without GPUs.

The rank runs in a process of its own, which sees a stand-in for the CUDA driver (`stand_in.py`, `driver/`). All else is
real: the trainer, autograd, the caching allocator, streams, FSDP, the NCCL process group, Inductor and Triton. Kernels
and collectives are counted, and never run. `changes.py` lists what of fivefold is changed for it, and why.
"""
