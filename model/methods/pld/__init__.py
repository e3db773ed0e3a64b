"""Prompt lookup decoding."""
