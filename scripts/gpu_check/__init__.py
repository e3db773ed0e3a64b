"""The check of a GPU: laws, costs and answers in ten minutes, and verdicts."""
