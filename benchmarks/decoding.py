"""How fast language models generate: model_center's and transformers', of the geometry of
Llama 3.2 1B with random weights in bf16.

    python benchmarks/decoding.py --name decoding --commit $(git rev-parse HEAD)

Every method has a process of its own for 1 and for 64 rows, and continues prompts of 128 tokens by
128, greedily. `first` is the first generation of a process, where kernels are compiled; `new` one
of a length that was not seen before; `again` the same once more, after some shorter ones, by which
a session has recorded all that it does. `step_ms` is what a further token takes: the time of 128
tokens less that of 32, by their number. A static cache compiles the model
anew for each number of tokens, so that it has only one length.

ours            generate of model_center, on one GPU
session         the same in a session, which keeps cache and recording from one to the next
transformers    its generate as it comes
static          its generate with a static cache, which compiles the model
sharded         model_center's over two GPUs, each of which generates for its own rows
sharded-session the same in a session, which keeps the gathered weights in place too
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from machine import machine_from_outside
from reports import report_of, write

import bmtrain as bmt
from model_center.generation.engine import generate
from model_center.generation.session import Session
from model_center.model.llama import Llama, LlamaConfig

NUM_NEW, NUM_FEW, PROMPT = 128, 32, 128
VOCAB, DIM, HEADS, HEADS_KV, DIM_HEAD, FF, LAYERS = 128256, 2048, 32, 8, 64, 8192, 16
BASE = 500000.0
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Continues ids (rows, tokens) by so many tokens.
Generate = Callable[[torch.Tensor, int], object]
LIMIT = 240  # seconds after which a method is given up
# Of each generation its name, whether its length is one more than before, and its new tokens.
ANY_LENGTH = (
    ("first", False, NUM_FEW),
    ("new", True, NUM_NEW),
    ("third", False, NUM_FEW),
    ("fourth", False, NUM_FEW),
    ("few", False, NUM_FEW),
    ("again", False, NUM_NEW),
)
ONE_LENGTH = (("first", False, NUM_NEW), ("new", False, NUM_NEW), ("again", False, NUM_NEW))
METHODS = {
    "ours": ANY_LENGTH,
    "session": ANY_LENGTH,
    "transformers": ANY_LENGTH,
    "static": ONE_LENGTH,
    "sharded": ANY_LENGTH,
    "sharded-session": ANY_LENGTH,
}
ON_TWO = {"sharded", "sharded-session"}
ROWS = (1, 64)


def ours(session: Session | None = None) -> Generate:
    """model_center's model, sharded if there is a process group."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        dim_model=DIM,
        num_heads=HEADS,
        num_heads_kv=HEADS_KV,
        dim_head=DIM_HEAD,
        dim_ff=FF,
        num_layers=LAYERS,
        norm_eps=1e-5,
        tied=True,
        rope_base=BASE,
        rope_scaling=SCALING,
        position_size=131072,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    if bmt.is_initialized():
        model = Llama(config)
        bmt.init_parameters(model)
    else:
        with torch.device("cuda"):
            model = Llama(config)
    return lambda ids, num_new: generate(model, ids, max_new_tokens=num_new, session=session)


def theirs(**options: Any) -> Generate:
    """transformers' model."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS_KV,
        head_dim=DIM_HEAD,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": BASE, **SCALING},
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval()

    def run(ids: torch.Tensor, num_new: int) -> object:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
            pad_token_id=0,
            **options,
        )

    return run


def records_of(method: str, rows: int, run: Generate) -> list[dict[str, Any]]:
    """Of each generation of a method."""
    records = []
    length, taken = PROMPT, dict[str, float]()
    for what, is_longer, num_new in METHODS[method]:
        length += is_longer
        ids = torch.randint(0, VOCAB, (rows, length), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run(ids, num_new)
        torch.cuda.synchronize()
        taken[what] = seconds = time.perf_counter() - begin
        records.append(
            {
                "what": "decoding",
                "method": method,
                "rows": rows,
                "generation": what,
                "prompt": length,
                "new_tokens": num_new,
                "seconds": round(seconds, 4),
                "tokens_per_s": round(rows * num_new / seconds, 1),
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
                "kept_mib": round((torch.cuda.memory_allocated() - before) / 2**20, 2),
                "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 3),
            }
        )
    if "few" in taken:
        step = (taken["again"] - taken["few"]) / (NUM_NEW - NUM_FEW)
        records[-1]["step_ms"] = round(1000 * step, 3)
    return records


def measure(method: str, rows: int) -> None:
    """Print the records of one method, a line each."""
    if method in ON_TWO:
        bmt.init_distributed()
    with Session() as session:
        run = {
            "ours": ours,
            "session": lambda: ours(session),
            "sharded": ours,
            "sharded-session": lambda: ours(session),
            "transformers": theirs,
            "static": lambda: theirs(cache_implementation="static"),
        }[method]()
        records = records_of(method, rows, run)
    if bmt.rank() == 0:
        for record in records:
            print(json.dumps(record | {"gpus": bmt.world_size()}), flush=True)


def measured(method: str, rows: int) -> list[dict[str, Any]]:
    """The records of a method in a process of its own; why there are none, if it fails."""
    begin = [sys.executable]
    if method in ON_TWO:
        begin += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*begin, __file__, "--method", method, "--rows", str(rows)]
    failed = {"what": "decoding", "method": method, "rows": rows}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return [failed | {"failed": f"over {LIMIT} s"}]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(done.stderr[-4000:], file=sys.stderr)
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [failed | {"failed": why}]
    return [json.loads(line) for line in lines]


def main() -> None:
    """Measure all methods and write a report, or one method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--name", default="decoding")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--method", choices=METHODS, help="this one alone, in this process")
    args = parser.parse_args()
    if args.method:
        measure(args.method, args.rows[0])
        return
    facts = machine_from_outside()
    records: list[dict[str, Any]] = []
    for method in args.methods:
        if method in ON_TWO and int(str(facts["num_gpus"])) < 2:
            continue
        for record in itertools.chain.from_iterable(measured(method, rows) for rows in args.rows):
            print(json.dumps(record), flush=True)
            records.append(record)
        report = report_of(
            records,
            commit=args.commit,
            command=shlex.join(["benchmarks/decoding.py", *sys.argv[1:]]),
            machine=facts,
        )
        write(report, args.out / f"{args.name}.json")


if __name__ == "__main__":
    main()
