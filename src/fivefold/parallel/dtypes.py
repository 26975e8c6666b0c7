"""The dtypes of torch in which a model of a precision computes and is stored."""

import torch

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
# Default precision of a model stored in such a dtype.
PRECISION_OF = {dtype: name for name, dtype in COMPUTE_DTYPES.items()} | {torch.float16: "bf16"}


def master_dtype(precision: str) -> torch.dtype:
    """Dtype of parameters and optimizer state: fp32, or fp64 in a proof that computes in it."""
    return torch.float64 if precision == "fp64" else torch.float32
