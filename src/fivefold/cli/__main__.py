"""`python -m fivefold.cli`, for launchers that start a module: `torchrun --nproc 2 -m fivefold.cli train run.yaml`."""

from fivefold.cli import main
from fivefold.core import code_cache

code_cache.leave_out_current_folder()
code_cache.keep_compiled()
main()
