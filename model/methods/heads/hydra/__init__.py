"""Hydra: trained heads, each of which reads the guesses of those before it."""

from ....options import Words

WORDS = {"hydra": Words("Hydra", published="Hydra")}
