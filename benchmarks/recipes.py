"""The recipes of the documentation, a few steps of each: python benchmarks/recipes.py

A command is read from its page and runs as it stands there, but for the number of steps and what it
reads and writes: models of the same geometry with random weights, texts of random words. So nothing
is downloaded, and what a step takes is what it takes with the real ones. Commands for one GPU run
side by side, one for each GPU and its share of the cores; those for several run alone. Writes
`results/recipes.json`, and a folder of logs where --logs says.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import queue
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import psutil
import torch
from machine import machine, machine_from_outside
from reports import report_of, write
from tables import recipe_cells, table_of

Record = dict[str, Any]

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "docs" / "site" / "en" / "recipes"
TOKENIZERS = ROOT / "tests" / "data" / "tokenizers"
# At most so many steps are not counted: kernels are chosen, states are made.
FIRST = 2
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that stands in for one of the hub.

    Attributes:
        tokenizer: a folder of tests/data/tokenizers.
        config: of the real one.
        weights: whether there are files of weights, which the command asks for; else it begins with
            random ones.
    """

    tokenizer: str
    config: dict[str, Any]
    weights: bool = True


MODELS = {
    "llama-3.1-8b": Model(
        "llama",
        {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA_3_ROPE,
            "tie_word_embeddings": False,
        },
        weights=False,
    ),
    "qwen3-0.6b": Model(
        "gpt2",
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
        },
        weights=False,
    ),
    "qwen3-8b": Model(
        "gpt2",
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
        },
        weights=False,
    ),
    "bert-large-cased": Model(
        "bert",
        {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "vocab_size": 28996,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 512,
        },
    ),
    "gpt2-base": Model(
        "gpt2",
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
        },
        weights=False,
    ),
}
TINY = {
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
}
TINY_EXAMPLE = shlex.split(
    "--layers 1 --dim 32 --heads 2 --vocab-size 300 --seq-len 32 --batch-size 2 --val-every 1000"
)
FROM_CONFIG = """
import sys, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
kind = getattr(transformers, config.architectures[0])
with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
    torch.set_default_dtype(torch.bfloat16)
    kind(config).save_pretrained(sys.argv[1])
"""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A command of a page.

    Attributes:
        page: its name.
        what: in the table.
        holds: words that this command of the page has, and no other.
        model: one of `MODELS`; None for a command that makes its own.
        steps: how many to run.
    """

    page: str
    what: str
    holds: str
    model: str | None
    steps: int

    @property
    def name(self) -> str:
        """Of its log and its folder."""
        return f"{self.page}-{RECIPES.index(self)}"


# The longest first: those for one GPU run side by side.
RECIPES = (
    Recipe("llama-3-8b", "Llama-3.1-8B, states in host memory", "adam-offload", "llama-3.1-8b", 2),
    Recipe("llama-3-8b", "Llama-3.1-8B, small states", "--moments", "llama-3.1-8b", 2),
    Recipe("llama-3-8b-lora", "Llama-3.1-8B, LoRA", "--lora-dropout", "llama-3.1-8b", 10),
    Recipe("gpt2", "GPT-2 124M, the example", "gpt2 --steps", None, 60),
    Recipe("qwen3", "Qwen3-0.6B", "Qwen3-0.6B", "qwen3-0.6b", 12),
    Recipe("bert-boolq", "BERT-large on BoolQ", "bert-large-cased", "bert-large-cased", 30),
    Recipe("llama-3-8b", "Llama-3.1-8B", "--lr-end 1e-6", "llama-3.1-8b", 3),
    Recipe("qwen3", "Qwen3-8B", "Qwen/Qwen3-8B", "qwen3-8b", 4),
    Recipe("gpt2", "GPT-2 124M of model_center", "pretrain_gpt2.py", "gpt2-base", 6),
)


def commands_of(text: str) -> Iterator[list[str]]:
    """The commands in the shell blocks of a page, in words."""
    for block in re.findall(r"```shell\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def command_of(recipe: Recipe) -> list[str]:
    """The command of a recipe as its page has it.

    Raises:
        LookupError: if the page has none, or several.
    """
    text = (PAGES / f"{recipe.page}.md").read_text(encoding="utf-8")
    found = [
        words
        for words in commands_of(text)
        if words[0] in ("torchrun", "make") and recipe.holds in " ".join(words)
    ]
    if len(found) != 1:
        raise LookupError(f"{recipe.page}.md has {len(found)} commands with {recipe.holds!r}.")
    return found[0]


def gpus_of(words: Sequence[str]) -> int:
    """On how many GPUs a page's command runs; `make` alone takes what there is: one here."""
    found = [word.partition("=")[2] for word in words if word.startswith("--nproc_per_node=")]
    return int(found[0]) if found else 1


def started_as(words: Sequence[str]) -> list[str]:
    """What to start in place of a page's command: the same program by this interpreter."""
    if words[0] == "make":
        arguments = next(word for word in words if word.startswith("ARGS="))
        program = ["examples/gpt2/train.py", *shlex.split(arguments.removeprefix("ARGS="))]
    else:
        program = [word for word in words[1:] if not word.startswith(("--standalone", "--nproc"))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={gpus_of(words)}", *program]


class StandIns:
    """Models and data in a folder, each made when it is first asked for.

    Args:
        folder: where.
        tiny: two layers of 64 channels in place of the real geometry.
    """

    def __init__(self, folder: pathlib.Path, *, tiny: bool) -> None:
        self._folder, self._tiny = folder, tiny

    def model(self, name: str) -> pathlib.Path:
        """A model's folder."""
        path, made = self._folder / name, MODELS[name]
        if path.exists():
            return path
        shutil.copytree(TOKENIZERS / made.tokenizer, path)
        small = {key: value for key, value in TINY.items() if self._tiny and key in made.config}
        (path / "config.json").write_text(json.dumps({**made.config, **small}))
        if made.weights:  # by a process of its own, which leaves no memory taken
            subprocess.run([sys.executable, "-c", FROM_CONFIG, str(path)], check=True)
        return path

    def conversations(self, count: int = 2000) -> pathlib.Path:
        """Questions of 40 words with answers of 200."""
        path, draw = self._folder / "chat.jsonl", random.Random(0)
        rows = (
            {
                "messages": [
                    {"role": "user", "content": text(draw, 40)},
                    {"role": "assistant", "content": text(draw, 200)},
                ]
            }
            for _ in range(200 if self._tiny else count)
        )
        return written(path, rows)

    def boolq(self) -> pathlib.Path:
        """A folder like that of BoolQ: questions of 9 words about passages of 110."""
        draw, folder = random.Random(0), self._folder / "down_data" / "superglue" / "BoolQ"
        folder.mkdir(parents=True, exist_ok=True)
        for split, count in (("train", 4000), ("val", 64), ("test", 64)):
            rows = (
                {
                    "question": text(draw, 9),
                    "passage": text(draw, 110),
                    "idx": number,
                    "label": draw.random() < 0.6,
                }
                for number in range(200 if self._tiny else count)
            )
            written(folder / f"{split}.jsonl", rows)
        return self._folder

    def tokens(self) -> pathlib.Path:
        """A folder with tokens of 2000 texts of 400 words, by `preprocess`."""
        draw, path = random.Random(0), self._folder / "corpus.jsonl"
        corpus = written(path, ({"text": text(draw, 400)} for _ in range(2000)))
        tokenizer = self.model("gpt2-base")
        words = ["--input", str(corpus), "--tokenizer", str(tokenizer), "--append-eod"]
        words += ["--workers", "2", "--output", str(self._folder / "corpus")]
        command = [sys.executable, "-m", "model_center", "preprocess", *words]
        subprocess.run(command, check=True, env=environment())
        return self._folder

    def instead(self, recipe: Recipe, folder: pathlib.Path) -> list[str]:
        """Arguments that take the place of those of the page; its records go to the folder."""
        if recipe.model is None:
            words = ["--save-dir", str(folder), "--cache-dir", str(self._folder / "example")]
            words += ["--steps", str(recipe.steps), "--sample-tokens", "0"]
            return words + (TINY_EXAMPLE if self._tiny else [])
        words = ["--train-iters", str(recipe.steps), "--log-dir", str(folder), "--log-iters", "1"]
        words += ["--model-config", str(self.model(recipe.model))]
        if recipe.page == "bert-boolq":
            return [*words, "--base-path", str(self.boolq())]
        if recipe.model == "gpt2-base":  # its warm-up is longer than these few steps
            return [*words, "--warmup-iters", "0.1", "--base-path", str(self.tokens())]
        words.append("--from-scratch")
        # answers to random weights never end
        return [*words, "--data", str(self.conversations()), "--samples", "0"]


def text(draw: random.Random, count: int) -> str:
    """So many words of few letters, each a token or two of any vocabulary."""
    return " ".join("".join(draw.choices("aeinrst", k=draw.randint(2, 4))) for _ in range(count))


def written(path: pathlib.Path, rows: Iterator[dict[str, Any]]) -> pathlib.Path:
    """The path, after rows went there as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def environment() -> dict[str, str]:
    """With this tree's packages."""
    paths = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PYTHONPATH": paths}


class HostMemory:
    """The most host memory that a process and its children have while the `with` block runs.

    Attributes:
        most: resident bytes, what they share counted once for each.
    """

    def __init__(self, pid: int) -> None:
        self.most = 0
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            try:
                processes = [self._process, *self._process.children(recursive=True)]
                self.most = max(self.most, sum(one.memory_info().rss for one in processes))
            except psutil.NoSuchProcess:  # one has ended between the two calls
                continue


@dataclasses.dataclass(frozen=True)
class Place:
    """GPUs and cores for a command."""

    gpus: tuple[int, ...]
    cores: tuple[int, ...]

    def started(self, command: Sequence[str], log: pathlib.Path) -> tuple[int, int]:
        """Run a command here. Returns its status and the most host memory that it had, in bytes."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))}
        here = ["taskset", "-c", ",".join(map(str, self.cores)), *command]
        with log.open("w") as out:
            process = subprocess.Popen(
                here, cwd=ROOT, env=environment() | visible, stdout=out, stderr=subprocess.STDOUT
            )
            with HostMemory(process.pid) as host:
                status = process.wait()
        return status, host.most


def places(count: int) -> list[Place]:
    """Where so many commands run side by side, the GPUs and cores dealt out among them."""
    cores, gpus = sorted(os.sched_getaffinity(0)), range(torch.cuda.device_count())
    return [
        Place(
            tuple(gpus[number * len(gpus) // count : (number + 1) * len(gpus) // count]),
            tuple(cores[number * len(cores) // count : (number + 1) * len(cores) // count]),
        )
        for number in range(count)
    ]


def measure(recipe: Recipe, command: Sequence[str], place: Place, logs: pathlib.Path) -> Record:
    """The record of a recipe: what a step took, or how the program failed."""
    log, page_command = logs / f"{recipe.name}.log", command_of(recipe)
    print(shlex.join(command), flush=True)
    began = time.time()
    status, host = place.started(command, log)
    record: Record = {
        "what": "recipe",
        "page": recipe.page,
        "setting": recipe.what,
        "gpus": gpus_of(page_command),
        "cores": len(place.cores),
        "command": shlex.join(page_command),
        "whole_s": round(time.time() - began, 1),
        "host_gib": round(host / 2**30, 1),
    }
    said = log.read_text(errors="replace")
    if status:
        errors = [line for line in said.splitlines() if "Error" in line]
        return record | {"failed": errors[:1] or said.splitlines()[-1:], "status": status}
    return record | figures(logs / recipe.name / "metrics.jsonl")


def without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The command without these flags and their values."""
    gone = {place + more for place, word in enumerate(words) if word in flags for more in (0, 1)}
    return [word for place, word in enumerate(words) if place not in gone]


def figures(path: pathlib.Path) -> Record:
    """Medians over the steps after the first ones."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in lines if "tokens_per_second" in record]
    counted = steps[min(FIRST, len(steps) - 1) :]
    seconds = statistics.median(record["seconds"] for record in counted)
    rate = statistics.median(record["tokens_per_second"] for record in counted)
    found = {
        "steps": len(steps),
        "step_s": round(seconds, 3),
        "slowest_step_s": round(max(record["seconds"] for record in counted), 3),
        "first_step_s": round(steps[0]["seconds"], 1),
        "tokens_per_second": round(rate),
        "tokens_a_step": round(
            statistics.median(r["seconds"] * r["tokens_per_second"] for r in counted)
        ),
        "allocated_gib": round(max(record["memory"] for record in steps) / 2**30, 1),
        "losses": [round(record["loss"], 4) for record in steps],
    }
    mfu = [record["mfu"] for record in counted if "mfu" in record]
    return found | ({"mfu": round(statistics.median(mfu), 3)} if mfu else {})


def prepared(recipe: Recipe, stand_ins: StandIns, logs: pathlib.Path) -> list[str]:
    """The command to start, once what it reads is there."""
    words = [word for word in command_of(recipe) if word != "--resume"]
    words = without(words, ("--save", "--save-iters"))
    return [*started_as(words), *stand_ins.instead(recipe, logs / recipe.name)]


def run(
    chosen: Sequence[Recipe],
    stand_ins: StandIns,
    logs: pathlib.Path,
    report: Callable[[Record], None],
) -> None:
    """Measure: those for one GPU side by side, then those for several one after the other."""
    commands = {recipe: prepared(recipe, stand_ins, logs) for recipe in chosen}
    single = [recipe for recipe in chosen if gpus_of(commands[recipe]) == 1]
    lanes = max(torch.cuda.device_count(), 1)
    free: queue.SimpleQueue[Place] = queue.SimpleQueue()
    for place in places(lanes):
        free.put(place)

    def in_a_lane(recipe: Recipe) -> Record:
        place = free.get()
        try:
            return measure(recipe, commands[recipe], place, logs)
        finally:
            free.put(place)

    with concurrent.futures.ThreadPoolExecutor(lanes) as pool:
        for done in concurrent.futures.as_completed(
            [pool.submit(in_a_lane, one) for one in single]
        ):
            report(done.result())
    for recipe in chosen:
        if recipe not in single:
            report(measure(recipe, commands[recipe], places(1)[0], logs))


def described(recipe: Recipe) -> str:
    """Its page, its setting and its GPUs."""
    gpus = gpus_of(command_of(recipe))
    return f"{recipe.page}, {recipe.what}, {gpus} GPU{'s' * (gpus > 1)}"


def kept(path: pathlib.Path, chosen: Sequence[Recipe]) -> list[Record]:
    """The records of recipes that do not run again now, with the machine that each is of."""
    if not path.exists():
        return []
    before, again = json.loads(path.read_text()), {recipe.what for recipe in chosen}
    return [
        {"machine": before["machine"], "commit": before["commit"]} | record
        for record in before["records"]
        if record["setting"] not in again
    ]


def main() -> None:
    """Run all, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="those whose page, setting and GPUs hold one of these: 'Llama-3.1-8B, 2 GPUs'",
    )
    parser.add_argument("--tiny", action="store_true", help="small models, for a try without a GPU")
    parser.add_argument("--logs", type=pathlib.Path, help="where logs and metrics stay")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument(
        "--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results" / "recipes.json"
    )
    args = parser.parse_args()
    chosen = [
        recipe
        for recipe in RECIPES
        if not args.only or any(part in described(recipe) for part in args.only)
    ]
    facts = machine_from_outside() if torch.cuda.is_available() else machine("cpu")
    records = kept(args.out, chosen) if args.only else []
    command = shlex.join(["benchmarks/recipes.py", *sys.argv[1:]])

    def report(record: Record) -> None:
        records.append(record | {"machine": facts, "commit": args.commit})
        print(json.dumps(record), flush=True)
        write(report_of(records, commit=args.commit, command=command, machine=facts), args.out)

    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or pathlib.Path(scratch, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        run(chosen, StandIns(pathlib.Path(scratch), tiny=args.tiny), logs, report)
    print(table_of(recipe_cells(records)))


if __name__ == "__main__":
    main()
