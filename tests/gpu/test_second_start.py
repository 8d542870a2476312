"""What a second start of a program compiles on a GPU, kernels of this library included: nothing."""

import pytest
import torch
from tests.ranks.test_second_start import compiles_once

pytestmark = [pytest.mark.gpu, pytest.mark.fresh]


def test_a_second_start_compiles_nothing(tmp_path):
    """Blocks at each level, in FP8, on request, a loss without logits, and Adam's kernel."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no eight-bit products")
    compiles_once(tmp_path, device=None)
