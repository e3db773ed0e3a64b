"""Recurrent and convolution states: what some layers keep in place of keys and values, or beside them."""
