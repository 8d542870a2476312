"""Cutting layers into stages: contiguous, the first stages have one more."""

import pytest

from bmtrain.errors import ConfigurationError
from bmtrain.parallel.microbatch import rows_per_micro_batch, stage_layers


@pytest.mark.parametrize("num_stages", range(1, 6))
def test_stage_layers(num_stages):
    for num_layers in range(1, 14):
        if num_layers < num_stages:
            with pytest.raises(ConfigurationError, match="at least one layer a stage"):
                stage_layers(num_layers, num_stages)
            continue
        layers = stage_layers(num_layers, num_stages)
        assert [layer for stage in layers for layer in stage] == list(range(num_layers))
        least, more = divmod(num_layers, num_stages)
        assert [len(stage) for stage in layers] == [least + (x < more) for x in range(num_stages)]


def test_rows_per_micro_batch():
    assert rows_per_micro_batch(3, 4, 6) == 2
    with pytest.raises(ConfigurationError, match="cannot be cut into 5 micro-batches"):
        rows_per_micro_batch(3, 4, 5)
