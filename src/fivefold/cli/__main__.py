"""`python -m fivefold.cli`, for launchers that start a module: `torchrun --nproc 2 -m fivefold.cli train run.yaml`."""

from fivefold.cli import main
from fivefold.core import bytecode, code_cache, safe_path

safe_path.leave_out_current_folder()
bytecode.keep()
code_cache.keep_compiled()
main()
