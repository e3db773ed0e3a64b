"""Train heads that draft for a model."""
