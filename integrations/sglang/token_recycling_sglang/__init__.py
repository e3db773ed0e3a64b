"""Token Recycling for SGLang: whole draft trees from earlier logits. Not run in the engine yet.

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm TOKEN_RECYCLING \
        --speculative-num-draft-tokens 16

SGLang is imported only where its classes are needed.
"""
