"""What is proved when a model is loaded, and what notices that it changed."""
