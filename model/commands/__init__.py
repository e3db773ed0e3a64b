"""Services for all command lines: option parsing, one-line errors, files, loading a checked model."""
