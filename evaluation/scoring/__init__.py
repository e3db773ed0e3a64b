"""Figures of answers: speed-up, mean accepted tokens, intervals, comparable runs."""
