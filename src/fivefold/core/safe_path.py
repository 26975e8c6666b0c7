"""Python's path without the current folder, whose files are data: a model folder may hold a `heapq.py`.

`python -m` and `python -c` put the current folder first, `-P` and PYTHONSAFEPATH do not (Python 3.11).
"""

import os
import sys
from contextlib import suppress


def leave_out_current_folder() -> None:
    """Remove the current folder from the path of this process, if Python put it there, and of its children."""
    with suppress(FileNotFoundError):  # a folder that was removed has no files
        if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
            del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"
