"""Triton kernels run here through Triton's interpreter: on the CPU, in numpy, the same source."""

import os

# Read by Triton when a kernel is defined, so before any kernel is imported.
os.environ["TRITON_INTERPRET"] = "1"
