"""DFlash and DSpark: a block of next tokens is guessed at once."""

from ....options import Words

WORDS = {"dflash": Words("DFlash", published="DFlash", options={"confidence": "cut below {}"})}
