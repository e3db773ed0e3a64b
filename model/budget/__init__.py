"""Shared by drafters: costs of steps and the node budget, learned acceptance, trees grown best first, templates."""
