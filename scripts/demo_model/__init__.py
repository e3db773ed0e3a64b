"""Training of the embedded demo model."""
