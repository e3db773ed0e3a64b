"""Stored results: packs of answer files, and the tables of pages that are made from them."""
