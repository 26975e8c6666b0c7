"""`python -m fivefold`."""

from fivefold.cli import main

main()
