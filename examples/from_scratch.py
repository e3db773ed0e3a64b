"""Token Recycling in one file, on a stock Hugging Face model. It needs torch and transformers only.

The idea: a forward pass predicts more than the one token that is kept. A matrix remembers, for every
token, the K tokens that were likeliest after it last time. Each step fills a tree of guesses from the
matrix, checks all guesses in one forward pass, and keeps the longest path that the model agrees with.
The text is that of plain greedy decoding; only the number of passes changes.

Method: Luo et al. 2024, https://arxiv.org/abs/2408.08696. Left out here, and done by the library: sampling,
several texts at a time, sliding windows, near-ties, trees sized to the device.

Run:
    python examples/from_scratch.py [MODEL]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

DEMO_MODEL = Path(__file__).parents[1] / "data/demo/model"
QUESTIONS = ("Tell me about the sea.", "Why is the sea blue?", "Who lives in the sea?")
K = 8  # successors kept for each token


def make_tree(width=6, depth=4):
    """Return each node's parent and rank, parents first. Rank r guesses the r-th likeliest successor.

    The product of (rank + 1) along a path is at most `width`: wide near the root, narrow below.
    """
    nodes = [(-1, 0, 1, 0)]  # parent, rank, product, depth; node 0 is the root
    for index, (_, _, product, level) in enumerate(nodes):  # the list grows under way
        ranks = range(min(K, width // product)) if level < depth else ()
        nodes += [(index, rank, product * (rank + 1), level + 1) for rank in ranks]
    return [node[0] for node in nodes], [node[1] for node in nodes]


PARENTS, RANKS = make_tree()
NUM_NODES = len(PARENTS)
VISIBLE = torch.eye(NUM_NODES, dtype=torch.bool)  # [N, N]: a node sees itself and its ancestors
for node in range(1, NUM_NODES):
    VISIBLE[node] |= VISIBLE[PARENTS[node]]
DEPTHS = VISIBLE.sum(1) - 1  # [N]
CHILDREN = [[c for c in range(NUM_NODES) if PARENTS[c] == node] for node in range(NUM_NODES)]


@torch.no_grad()
def generate(model, prompt, adjacency, eos, max_new_tokens):
    """Decode greedily; return the new tokens and the number of steps. `adjacency` [V, K] learns."""
    cache = DynamicCache()
    model(torch.tensor([prompt[:-1]]), past_key_values=cache)  # its last token is the first root
    last, new, num_steps = prompt[-1], [], 0
    while len(new) < max_new_tokens and eos not in new:
        # 1. Draft: node n guesses a successor of its parent's token.
        draft = [last]
        for parent, rank in zip(PARENTS[1:], RANKS[1:], strict=True):
            draft.append(int(adjacency[draft[parent], rank]))

        # 2. Verify all nodes in one forward pass, each at its depth, each with its ancestors only.
        past = cache.get_seq_length()
        mask = torch.zeros(1, 1, NUM_NODES, past + NUM_NODES, dtype=model.dtype)
        mask[..., past:].masked_fill_(~VISIBLE, torch.finfo(model.dtype).min)
        nodes, positions = torch.tensor([draft]), (past + DEPTHS)[None]
        logits = model(
            nodes, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits[0]  # [N, V]

        # 3. Accept: go down while a child is the model's own next token. The last token comes free.
        choices = logits.argmax(-1).tolist()
        path, tokens = [0], [choices[0]]
        while agreed := [child for child in CHILDREN[path[-1]] if draft[child] == tokens[-1]]:
            path.append(agreed[0])
            tokens.append(choices[agreed[0]])

        # 4. Keep the cache rows of the accepted path.
        rows = torch.cat([torch.arange(past), past + torch.tensor(path)])
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]

        # 5. Recycle: remember what the model found likeliest after every node, rejected ones included.
        adjacency[nodes[0]] = logits.topk(K).indices
        last, num_steps = tokens[-1], num_steps + 1
        new += tokens
    new = new[:max_new_tokens]
    return (new[: new.index(eos) + 1] if eos in new else new), num_steps


def main(model_path=DEMO_MODEL, max_new_tokens=100):
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    adjacency = torch.zeros(model.config.vocab_size, K, dtype=torch.long)  # [V, K], lives on
    for question in QUESTIONS:
        prompt = tokenizer(f"USER: {question} ASSISTANT:").input_ids
        tokens, steps = generate(model, prompt, adjacency, tokenizer.eos_token_id, max_new_tokens)
        print(f"\n{question}\n{tokenizer.decode(tokens, skip_special_tokens=True).strip()}")
        print(f"{len(tokens)} tokens in {steps} steps: {len(tokens) / steps:.2f} tokens a step")
        ids = torch.tensor([prompt])
        plain = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0]
        print("equal to generate:", plain[len(prompt) :].tolist() == tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
