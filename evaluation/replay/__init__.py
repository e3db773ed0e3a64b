"""Drafters scored on a model's recorded texts, without the model."""
