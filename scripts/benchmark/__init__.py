"""Costs of forward passes on this device, and the README's table of results."""
