"""The command `python -m model.serve`."""

from .command import main

if __name__ == "__main__":
    main()
