"""Checks of the path that only a GPU takes, on a GPU or on a simulated one."""
