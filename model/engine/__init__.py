"""One decoding step: propose a tree, verify it in one forward pass, keep, observe."""
