"""What several methods need to grow a tree: best-first growth, acceptance rates, backoff."""
