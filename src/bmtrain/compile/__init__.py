"""torch.compile of blocks: shared compiled code, graph rewrites and FP8 linear layers."""
