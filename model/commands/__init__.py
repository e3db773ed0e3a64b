"""What every command line needs: option parsing, one-line errors, files, a model loaded and checked."""
