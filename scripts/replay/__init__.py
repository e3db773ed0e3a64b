"""Drafters scored on recorded answers, without the model."""
