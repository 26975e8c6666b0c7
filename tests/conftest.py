"""What holds for every test."""

import torch

torch.set_num_threads(1)  # models are 32 wide: threads that wait for each other cost more than they save
