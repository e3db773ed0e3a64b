"""Answering questions: options, the run, its workers."""
