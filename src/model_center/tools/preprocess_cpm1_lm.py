"""Token data of CPM-1 by the flags of ModelCenter's program of this name.

`python -m model_center.tools.preprocess_cpm1_lm --input texts/part_ --uid 3 --tokenizer_path
cpm1-large --output_path tokens` reads `texts/part_3.txt` and writes
`tokens/cpm1_lm_document_context_3.bin` and `.idx`, as `python -m model_center preprocess --preset
cpm1` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from model_center.preprocess import command


def get_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags in `given`; those of the command line if None."""
    parser = argparse.ArgumentParser(description="Turn text into token data for CPM-1.")
    add = parser.add_argument
    add("--input", required=True, help="what the name of the text has before UID.txt")
    add("--tokenizer_path", required=True, help="a folder, or a name of model_center")
    add("--output_path", required=True, help="the folder of the token data")
    add("--output_prefix", default="cpm1_lm", help="how the names of their files begin")
    add("--dataset_impl", choices=["mmap"], default="mmap", help="the kind of index")
    add("--uid", default="0", help="number of the text")
    add("--workers", type=int, default=64, help="processes that tokenise")
    add("--log_interval", type=int, default=10000, help="accepted; the progress is shown")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Write the token data that the flags ask for.

    Raises:
        DataError: for files that are not there, and text that cannot be read.
    """
    args = get_args(given)
    name = f"{args.output_prefix}_document_context_{args.uid}"
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = {
        "--input": f"{args.input}{args.uid}.txt",
        "--output": str(Path(args.output_path, name)),
        "--tokenizer": args.tokenizer_path,
        "--preset": "cpm1",
        "--workers": str(args.workers),
    }
    command.run(parser.parse_args([f"{flag}={value}" for flag, value in flags.items()]))


if __name__ == "__main__":
    main()
