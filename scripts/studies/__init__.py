"""The studies of docs/studies."""
