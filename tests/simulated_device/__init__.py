"""GPUs simulated on the CPU: right numbers, a GPU's refusals, accounts; and the path of a GPU, run on them."""
