"""Scripts of jobs: a template beside the module of its engine, filled in."""

import json
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from jinja2 import Environment, StrictUndefined

from fivefold.jobs.job import Job


def filled(file: Path, job: Job, **values: Any) -> str:
    """Return the template `file` with a job and other values. `quote` writes text for a shell, `python` for Python."""
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"quote": quote, "python": partial(json.dumps, ensure_ascii=False)}  # text is that of JSON
    head = "# " + job.head.replace("\n", "\n# ")
    return environment.from_string(file.read_text(encoding="utf-8")).render(job=job, head=head, **values)
