"""Entry of the command line, `retrograd` or `python -m retrograd`."""

from retrograd import config


def main() -> None:
    """Run a command; what it imports may have to be compiled, so where that is kept is decided first."""
    config.keep_bytecode("torch")
    from retrograd.cli import main as command

    command(prog_name="retrograd")


if __name__ == "__main__":
    main()
