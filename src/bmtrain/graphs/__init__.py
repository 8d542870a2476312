"""CUDA graphs: passes of a small model that are repeated without Python."""
