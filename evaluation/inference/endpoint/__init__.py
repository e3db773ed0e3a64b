"""An OpenAI-compatible server as an entrant: asked question by question into the same answer files."""
