"""`python -m lightning_commhooks`: see `advice/cli.py`."""

from lightning_commhooks.advice.cli import main

if __name__ == "__main__":
    main()
