"""SpS: speculative sampling with a smaller draft model."""
