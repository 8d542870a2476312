"""What it takes to make tokens of a million conversations: python benchmarks/tokenising.py

Makes conversations of four turns and some 400 tokens of synthetic words, trains a byte-level
tokenizer on some of them, builds the index on --cores cores with as many processes, and starts a
second time. Prints and writes to `results/tokenising.json` seconds, rows a second, milliseconds of
one core a row (of the processes that tokenise and of the one that reads and writes), bytes on disk,
peak memory, and what a million rows take at this rate. Needs no network; Linux.

The text is drawn word by word from --words words, common ones more often, so that the tokenizer's
cache of words misses as it does in real text. Making the data takes all cores and is not counted.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import resource
import string
import sys
import tempfile
import threading
import time
from typing import Any

import psutil
import tokenizers
import transformers
from machine import machine
from reports import report_of, write

from model_center.dataset.instructions import InstructionDataset

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")
TOKENS, TURNS, HEADING = 400, 4, 6  # of a row, in it, and about what a template adds to each
VOCABULARY = 32_000
MILLION = 1_000_000
GIB = 2**30


@functools.cache
def words(count: int) -> tuple[list[str], list[float]]:
    """Words of two to twelve letters, and how often each comes up to there, after Zipf."""
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 12)))] = None
    shares = itertools.accumulate(1 / (rank + 10) for rank in range(count))
    return list(found), list(shares)


def text(draw: random.Random, size: int, count: int) -> str:
    """A text of so many words, of `count` that there are."""
    known, shares = words(count)
    return " ".join(draw.choices(known, cum_weights=shares, k=size)).capitalize() + "."


def write_rows(path: str, seed: int, rows: int, size: int, count: int) -> None:
    """A file of conversations, each turn of `size` words."""
    draw = random.Random(seed)
    with pathlib.Path(path).open("w", encoding="utf-8") as file:
        for _ in range(rows):
            turns = ", ".join(
                f'{{"role": "{role}", "content": "{text(draw, size, count)}"}}'
                for role in ("user", "assistant") * (TURNS // 2)
            )
            file.write(f'{{"messages": [{turns}]}}\n')


def trained(count: int) -> Any:
    """A tokenizer trained on such texts."""
    draw = random.Random(1)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=[*SPECIAL],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator((text(draw, 300, count) for _ in range(2000)), trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[1], chat_template=TEMPLATE
    )


def make(folder: pathlib.Path, rows: int, size: int, count: int) -> None:
    """The data, by all cores."""
    cores = len(os.sched_getaffinity(0))
    bounds = [rows * part // cores for part in range(cores + 1)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(cores, context) as pool:
        waiting = [
            pool.submit(write_rows, str(folder / f"{n:03}.jsonl"), n + 2, end - begin, size, count)
            for n, (begin, end) in enumerate(itertools.pairwise(bounds))
        ]
        for one in waiting:
            one.result()


def seconds(who: int) -> float:
    """Of processor time."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


class Peak(threading.Thread):
    """The most memory that this process and its children have had together, looked at each second.

    Pages that several share count once: what is measured is the proportional size.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.all = self.own = 0
        self._end = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        me = psutil.Process()
        while not self._end.wait(1.0):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    size = process.memory_full_info().pss
                except psutil.Error:  # it has just ended
                    continue
                total += size
                self.own = max(self.own, size if process == me else 0)
            self.all = max(self.all, total)

    def stop(self) -> None:
        """End."""
        self._end.set()
        self.join()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=MILLION)
    parser.add_argument("--cores", type=int, default=8, help="that may be used, and processes")
    parser.add_argument("--words", type=int, default=100_000, help="different words in the text")
    parser.add_argument("--folder", help="where data and index lie meanwhile; the system's")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--commit", default="unknown")
    args = parser.parse_args()
    start = time.perf_counter()
    tokenizer = trained(args.words)
    sample = text(random.Random(2), 10_000, args.words)
    size = round((TOKENS / TURNS - HEADING) / (len(tokenizer(sample)["input_ids"]) / 10_000))
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path, cache = pathlib.Path(folder, "data"), pathlib.Path(folder, "tokens")
        path.mkdir()
        make(path, args.rows, size, args.words)
        data_bytes = sum(file.stat().st_size for file in path.iterdir())
        made = time.perf_counter() - start
        print(f"made {args.rows} conversations in {made:.0f} s", flush=True)
        cores = sorted(os.sched_getaffinity(0))[: args.cores]
        os.sched_setaffinity(0, cores)  # of this process and of those that it starts
        last = time.perf_counter()

        def report(rows: int) -> None:
            nonlocal last
            if time.perf_counter() - last > 20:
                last = time.perf_counter()
                print(f"{rows} rows, {rows / (last - begin):.0f} a second", flush=True)

        own, others = seconds(resource.RUSAGE_SELF), seconds(resource.RUSAGE_CHILDREN)
        peak = Peak()
        peak.start()
        begin = time.perf_counter()
        data = InstructionDataset(
            path, tokenizer, 4096, cache=cache, workers=len(cores), report=report
        )
        whole = time.perf_counter() - begin
        peak.stop()
        own = seconds(resource.RUSAGE_SELF) - own
        others = seconds(resource.RUSAGE_CHILDREN) - others
        begin = time.perf_counter()
        InstructionDataset(path, tokenizer, 4096, cache=cache, workers=len(cores))
        again = time.perf_counter() - begin
        index_bytes = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    record = {
        "what": "tokenising",
        "rows": args.rows,
        "cores": len(cores),
        "cores_of_the_machine": os.cpu_count(),
        "tokens_a_row": round(float(data.lengths.mean()), 1),
        "made_s": round(made, 1),
        "wall_s": round(whole, 1),
        "again_s": round(again, 2),
        "rows_a_second": round(args.rows / whole),
        "tokens_a_second": round(int(data.lengths.sum()) / whole),
        "minutes_of_a_million": round(whole / args.rows * MILLION / 60, 2),
        "tokenising_ms_a_row": round(others / args.rows * 1e3, 3),
        "first_process_ms_a_row": round(own / args.rows * 1e3, 3),
        "data_gib": round(data_bytes / GIB, 3),
        "index_gib": round(index_bytes / GIB, 3),
        "peak_gib": round(peak.all / GIB, 2),
        "peak_gib_of_first_process": round(peak.own / GIB, 2),
    }
    print(json.dumps(record))
    command = " ".join(["python", "benchmarks/tokenising.py", *sys.argv[1:]])
    versions = {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__}
    report_ = report_of(
        [record], commit=args.commit, command=command, machine=machine("cpu") | versions
    )
    write(report_, args.out or pathlib.Path(__file__).with_name("results") / "tokenising.json")


if __name__ == "__main__":
    main()
