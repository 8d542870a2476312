"""What is computed again in backward: levels, plans that fit into memory, and runs that repeat a
forward pass.
"""
