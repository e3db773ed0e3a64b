"""Tree growth shared by several methods: best-first growth, learned acceptance, backoff."""
