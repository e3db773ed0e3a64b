"""The command `python -m model.chat`."""

from model.chat.command import main

if __name__ == "__main__":
    main()
