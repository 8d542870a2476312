"""Where the data of a program are."""

from __future__ import annotations

import pathlib

from model_center.errors import DataError


def data_folder(base_path: str, name: str) -> pathlib.Path:
    """`<base>/down_data/<name>`, or `<base>/<name>` where there is no down_data.

    Raises:
        DataError: if there is neither.
    """
    candidates = [pathlib.Path(base_path, "down_data", name), pathlib.Path(base_path, name)]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise DataError(
        f"there is neither {candidates[0]} nor {candidates[1]}: unpack the data there, or "
        "give another --base-path."
    )
