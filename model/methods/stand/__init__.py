"""STAND: drafts drawn from averaged rows of n-grams, accepted by the ratio of probabilities."""

from ...options import Words

WORDS = {"stand": Words("STAND", published="STAND")}
