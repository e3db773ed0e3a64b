"""EAGLE, EAGLE-2 and EAGLE-3: a one-layer draft network that continues the target model's hidden states."""
