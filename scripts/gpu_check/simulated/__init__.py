"""GPUs simulated on the CPU: right numbers, a GPU's refusals, and accounts of launches, copies and waits."""
