"""An OpenAI-compatible server for measuring and for one's own machine: `python -m model.serve MODEL`."""
