"""Backends run a draft through a model: the stock model, CPU programs and CUDA graphs, behind one seam."""
