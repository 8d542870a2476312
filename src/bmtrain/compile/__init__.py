"""torch.compile of blocks: its programs, what is rewritten in graphs, linear maps in eight bits."""
