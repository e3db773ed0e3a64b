"""Question files and the prompts made of them."""
