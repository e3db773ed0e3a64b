"""A chat in the terminal: `python -m model.chat`."""
