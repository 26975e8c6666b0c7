"""`fivefold` and `python -m fivefold`."""

from fivefold.core import interrupts


def main() -> None:
    """Run the command line and exit with its code. Ctrl-C ends it at once during the imports (a third of a second)."""
    interrupts.end_at_once(word="stopped\n")
    from fivefold.core import code_cache

    code_cache.leave_out_current_folder()
    code_cache.keep_compiled()
    from fivefold.cli import main as run

    interrupts.raise_again()
    run()


if __name__ == "__main__":
    main()
