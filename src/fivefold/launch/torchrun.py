"""torchrun, with the exit code of the worker that failed first.

    python -m fivefold.launch.torchrun OPTIONS OF TORCHRUN -m fivefold.cli train RUN.yaml

torchrun exits with 1 on any failure. This wrapper exits with 2 for a wrong request, which would fail again, and with
143 after a stop on request, saved, so schedulers know whether to retry.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun, and return the exit code: 128 and its number for a signal, as shells have it."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        options = run.parse_args(list(sys.argv[1:] if arguments is None else arguments))  # type: ignore[no-untyped-call]
        run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
