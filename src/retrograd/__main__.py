"""`python -m retrograd`."""

from retrograd.cli import main

if __name__ == "__main__":
    main(prog_name="retrograd")
