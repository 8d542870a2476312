"""What differs between the versions of transformers that the tests of models run with."""

import pytest
import transformers

IS_4 = transformers.__version__.startswith("4.")
since_5 = pytest.mark.skipif(IS_4, reason="asks for what transformers 5 does otherwise than 4")


def rope(rope_theta, **scaling):
    """Values of a configuration that say how positions are rotated, as words without blanks."""
    given = (
        {"rope_theta": rope_theta, "rope_scaling": scaling}
        if IS_4
        else {"rope_parameters": {"rope_theta": rope_theta, **scaling}}
    )
    return " ".join(f"{name}={value}".replace(" ", "") for name, value in given.items())
