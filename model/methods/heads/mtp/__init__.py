"""Multi-token prediction (MTP): the layers that a checkpoint ships to guess the tokens after the next one."""
