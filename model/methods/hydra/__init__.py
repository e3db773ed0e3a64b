"""Hydra: trained heads, each of which reads the guesses of those before it."""
