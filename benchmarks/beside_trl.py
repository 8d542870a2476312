"""Losses of `train --objective` beside trl's trainers: the same tiny model, pairs and order.

    python benchmarks/beside_trl.py   # needs trl; writes benchmarks/results/beside-trl.json

One process on the CPU, fp32, AdamW, 20 steps of 4 pairs. ORPO is not among them: trl takes the
cross-entropy of the prompt too, the paper that of the answer.
"""

from __future__ import annotations

import datetime
import importlib
import json
import pathlib
import sys
import tempfile
from typing import Any

import torch
import transformers

import bmtrain as bmt
from model_center.commands.train import train
from model_center.dataset.sampler import permutation

ROOT = pathlib.Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "beside-trl.json"
STEPS, PAIRS, SEED, LR = 20, 4, 7, 5e-4
# Ends where the answer ends: trl learns line breaks behind it, too.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role + '\n' + message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)


def main() -> None:
    """Run both, compare, write."""
    trl: Any = importlib.import_module("trl")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rows = [
            {
                "prompt": [{"role": "user", "content": f"What is {n % 9} plus {n // 9}?"}],
                "chosen": [{"role": "assistant", "content": f"It is {n % 9 + n // 9}."}],
                "rejected": [{"role": "assistant", "content": f"{n % 9}, or perhaps {n // 9}?"}],
            }
            for n in range(STEPS * PAIRS)
        ]
        data = folder / "pairs.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        order = permutation(len(rows), SEED, 0).tolist()
        ordered = [rows[place] for place in order]
        for kind in ("dpo", "simpo", "reward"):
            model = _make(folder / kind, is_reward=kind == "reward")
            ours = _ours(kind, model, data, folder / f"{kind}-run")
            theirs = _theirs(kind, model, ordered, folder / f"{kind}-trl")
            apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            found[kind] = {"ours": ours, "trl": theirs, "largest_difference": apart}
            print(f"{kind}: {ours[0]:.6f} to {ours[-1]:.6f}, at most {apart:.1e} apart", flush=True)
    content = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": {x.__name__: x.__version__ for x in (torch, transformers, trl)},
        "losses": found,
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    if any(one["largest_difference"] > 1e-5 for one in found.values()):
        sys.exit("the losses differ")


def _make(folder: pathlib.Path, *, is_reward: bool) -> pathlib.Path:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        ROOT / "tests" / "data" / "tokenizers" / "gpt2"
    )
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, tokenizer.eos_token
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)
    config.eos_token_id, config.num_labels = tokenizer.eos_token_id, 1
    if is_reward:  # of others transformers would keep the gradient of the end's embedding at 0
        config.pad_token_id = tokenizer.eos_token_id
    torch.manual_seed(SEED)
    kind: Any = (
        transformers.Qwen3ForSequenceClassification if is_reward else transformers.Qwen3ForCausalLM
    )
    kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _ours(kind: str, model: pathlib.Path, data: pathlib.Path, save: pathlib.Path) -> list[float]:
    words = f"--objective {kind} --dtype fp32 --lr {LR} --lr-decay-style constant --warmup-iters 0"
    words += f" --batch-size {PAIRS} --seed {SEED} --max-length 128 --save {save} --data {data}"
    seen: list[float] = []
    train(
        ["--model-config", str(model), *words.split()],
        lambda figures: seen.append(figures["loss"]) if "loss" in figures else None,
    )
    bmt.shutdown()
    return seen


def _theirs(
    kind: str, model: pathlib.Path, rows: list[dict[str, Any]], folder: pathlib.Path
) -> list[float]:
    datasets: Any = importlib.import_module("datasets")
    where, name = {
        "dpo": ("trl", "DPO"),
        "simpo": ("trl.experimental.cpo", "CPO"),
        "reward": ("trl", "Reward"),
    }[kind]
    library: Any = importlib.import_module(where)
    base: Any = vars(library).get(f"{name}Trainer") or getattr(library, f"{name}Trainer")
    seen: list[float] = []

    class Recorded(base):  # type: ignore[misc]
        """Notes each loss, and takes the rows in their order."""

        def compute_loss(self, model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
            found = super().compute_loss(model, inputs, *more, **others)
            seen.append((found[0] if isinstance(found, tuple) else found).item())
            return found

        def _get_train_sampler(self, *ignored: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    known: dict[str, dict[str, Any]] = {
        "dpo": {"beta": 0.1},
        "simpo": {"beta": 2.0, "loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0},
        "reward": {"center_rewards_coefficient": None},
    }
    own = known[kind]
    options = getattr(library, f"{name}Config")(
        output_dir=str(folder),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        learning_rate=LR,
        weight_decay=1e-2,
        lr_scheduler_type="constant",
        max_length=128,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **own,
    )
    kind_of: Any = (
        transformers.AutoModelForSequenceClassification
        if kind == "reward"
        else transformers.AutoModelForCausalLM
    )
    Recorded(
        model=kind_of.from_pretrained(model, dtype=torch.float32),
        args=options,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    ).train()
    return seen


if __name__ == "__main__":
    main()
