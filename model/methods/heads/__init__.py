"""Methods with trained heads, and what they share: files of heads, layers, the tree of static heads."""
