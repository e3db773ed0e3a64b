"""All sources in one tree."""
