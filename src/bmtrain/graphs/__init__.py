"""CUDA graphs: replay of passes of a small model without Python."""
