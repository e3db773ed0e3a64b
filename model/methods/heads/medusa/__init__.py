"""Medusa: trained heads that each guess one of the next tokens."""

from ....options import Words

WORDS = {"medusa": Words("Medusa", published="Medusa")}
