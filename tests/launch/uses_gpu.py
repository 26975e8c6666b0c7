"""A body whose import starts CUDA, which torch tells every process that is forked afterwards."""

import os

import torch

from tests.launch.bodies import sum_ranks as sum_ranks

if "RANK" not in os.environ:
    torch.cuda._is_in_bad_fork = lambda: True
