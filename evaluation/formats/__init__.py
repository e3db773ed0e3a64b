"""The steps of answers, and other people's formats of acceptance."""
