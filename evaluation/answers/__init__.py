"""Answer files and their sidecars: written, read, checked."""
