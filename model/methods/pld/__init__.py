"""PLD: prompt lookup decoding."""
