"""What it takes to make tokens of conversations: python benchmarks/tokenising.py [--rows 20000]

Conversations of four turns and some 400 tokens, a ChatML template, a byte-level vocabulary.
Prints and writes to `results/tokenising.json` milliseconds of one core a row, of the processes that
tokenise and of the one that writes, what a million rows take on --cores from that, and the time to
find the tokens again.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import transformers
from machine import machine
from reports import report_of, write

from model_center.dataset.instructions import InstructionDataset

ROOT = pathlib.Path(__file__).parents[1]
TOKENIZER = ROOT / "tests" / "data" / "tokenizers" / "gpt2"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = 400
MILLION = 1_000_000


def conversations(path: pathlib.Path, rows: int, tokenizer: Any) -> None:
    """A file of so many, each of some TOKENS tokens."""
    draw = random.Random(0)
    text = (ROOT / "docs" / "site" / "en" / "guides" / "memory.md").read_text("utf-8").split()
    per_word = len(tokenizer(" ".join(text))["input_ids"]) / len(text)
    size = int(TOKENS / per_word / 4)
    with path.open("w") as file:
        for _ in range(rows):
            turns = [
                {"role": role, "content": " ".join(draw.choices(text, k=size))}
                for role in ("user", "assistant") * 2
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def seconds(who: int) -> float:
    """Of processor time."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cores", type=int, default=8)
    args = parser.parse_args()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory() as folder:
        path, cache = pathlib.Path(folder, "a.jsonl"), pathlib.Path(folder, "cache")
        conversations(path, args.rows, tokenizer)
        own, others = seconds(resource.RUSAGE_SELF), seconds(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        data = InstructionDataset(path, tokenizer, 4096, cache=cache, workers=args.workers)
        whole = time.perf_counter() - begin
        own = seconds(resource.RUSAGE_SELF) - own
        others = seconds(resource.RUSAGE_CHILDREN) - others
        begin = time.perf_counter()
        InstructionDataset(path, tokenizer, 4096, cache=cache, workers=args.workers)
        again = time.perf_counter() - begin
    # The first process and those that tokenise work at the same time; all share the cores.
    minutes = (own + others) / args.rows * MILLION / args.cores / 60
    record = {
        "what": "tokenising",
        "rows": args.rows,
        "workers": args.workers,
        "tokens_a_row": round(float(data.lengths.mean()), 1),
        "tokenising_ms_a_row": round(others / args.rows * 1e3, 3),
        "first_process_ms_a_row": round(own / args.rows * 1e3, 3),
        "wall_s": round(whole, 1),
        "again_s": round(again, 3),
        "cores": args.cores,
        "minutes_of_a_million": round(max(minutes, own / args.rows * MILLION / 60), 1),
    }
    print(json.dumps(record))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    command = " ".join(["python", "benchmarks/tokenising.py", *sys.argv[1:]])
    report = report_of([record], commit=commit, command=command, machine=machine("cpu"))
    write(report, pathlib.Path(__file__).with_name("results") / "tokenising.json")


if __name__ == "__main__":
    main()
