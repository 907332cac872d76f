"""The `shoal` command, and `python -m shoal`."""

from shoal.launch.stop_signals import signals_exit


def main() -> None:
    """Import the command line and run it. A signal meanwhile ends the process with a sentence."""
    with signals_exit():
        from shoal import cli
    cli.main()


if __name__ == "__main__":
    main()
