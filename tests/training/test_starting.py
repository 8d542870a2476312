"""Starting a run: ranks without a launcher, flags from a file, and a run's folder as a model."""

import argparse
import signal
import subprocess
import sys
import time

import peft
import pytest
import torch
import transformers
from tests.training.lm_programs import drawn_adapters, tiny

import bmtrain as bmt
from model_center.__main__ import main
from model_center.commands import train
from model_center.commands.configuration import differences, keep, model_in, words_of
from model_center.errors import ConfigError
from model_center.training.trained_model import trained_model_of

# peft calls transformers so
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
RUN = [sys.executable, "-m", "bmtrain", "run", "--ranks", "2"]
PROGRAM = """
import pathlib, signal, sys, time
from bmtrain.runtime import world
def stop(*_):
    print("asked", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, stop)
rank, ready = world.launched().rank, pathlib.Path(__file__).with_name("ready")
print(sys.argv[1:], rank, world.launched().size, flush=True)
if rank == 0:
    ready.touch()
elif "fail" in sys.argv:
    while not ready.exists():
        time.sleep(0.01)
    sys.exit(75)
if "done" not in sys.argv:
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("word", "status", "asked"),
    [
        ("done", 0, 0),
        ("fail", 75, 1),
        ("SIGTERM", 5, 2),
        pytest.param("SIGINT", 5, 2, marks=pytest.mark.long),
    ],
)
def test_ranks_without_a_launcher(word, status, asked, tmp_path):
    """Each knows its place. The code of the first that fails is passed on, and so are signals.

    Ranks do not print where Ctrl-C has met them before the run has begun.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = subprocess.Popen([*RUN, str(program), word], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    lines = [started.stdout.readline() for _ in range(2)]
    assert sorted(lines) == [f"['{word}'] {rank} 2\n" for rank in range(2)]
    if word.startswith("SIG"):
        time.sleep(0.2)
        started.send_signal(signal.Signals[word])
    rest, _ = started.communicate(timeout=60)
    assert started.returncode == status and rest.count("asked") == asked


def parsed(*words):
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(words_of(words, parser))


def test_flags_in_a_file(tmp_path):
    """Are the flags; those of the command line count before them. What a run keeps is such a file."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_config: m\ndata: [a.jsonl, 'b.jsonl:0.5']\nlr: 1e-3\nlora-rank: 8\n"
        "use_checkpoint: false\nload_in_4bit: true\nsave_blocking: false\nvalidation: null\n"
        "adam_betas: [0.9, 0.95]\ncurves: tensorboard\ntoo_long: drop\n"
    )
    flags = "--model-config m --data a.jsonl b.jsonl:0.5 --lr 1e-3 --lora-rank 8 --load-in-4bit"
    flags += " --no-use-checkpoint --adam-betas 0.9 0.95 --curves tensorboard --too-long drop"
    expected = parsed(*flags.split())
    found = parsed("--config", str(path))
    assert vars(found) == vars(expected)
    assert vars(parsed("--config", str(path), "--lr", "2e-3")) == {**vars(expected), "lr": 2e-3}
    keep(found, tmp_path)
    assert vars(parsed("--config", str(path))) == vars(expected)
    other = parsed("--config", str(path), "--lr", "2e-3", "--resume")
    assert differences(other, tmp_path) == ["lr was 0.001 and is 0.002"]
    path.write_text("leraning_rate: 1\n")
    with pytest.raises(ConfigError, match=r"'leraning_rate'.*: no flag"):
        parsed("--config", str(path))
    path.write_text("- a\n")
    with pytest.raises(ConfigError, match="holds list: expected flags and values"):
        parsed("--config", str(path))


def saved(adapted, base, run):
    """The folder of a run that has made these adapters of a model."""
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    drawn_adapters(adapted).save_pretrained(run / "adapter")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(run / "adapter")
    return run


def test_adapters_and_their_model(tmp_path, capsys):
    """A run's folder means what the run has made; `merge` makes a model of it."""
    base = tiny("llama", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"]))
    run = saved(adapted, base, tmp_path / "run")
    for name in (run, run / "adapter"):
        assert model_in(str(name)) == (str(base), str(run / "adapter"))
    assert model_in(str(base)) == (str(base), None) and model_in("org/name") == ("org/name", None)
    assert main(["merge", str(run), str(run / "model")]) == 0
    assert model_in(str(run)) == (str(run / "model"), None)
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
    capsys.readouterr()
    assert main(["merge", str(base), str(tmp_path / "x")]) == 1
    assert "holds no adapters" in capsys.readouterr().err
    words = ["train", "--ranks", "1", "--data", "x", "--model-config", str(run / "adapter")]
    assert main(words) == 1
    assert "merge them into their model" in capsys.readouterr().err
    bmt.shutdown()  # of the command that was refused


def test_adapters_of_a_reward_model(tmp_path, capsys):
    """`merge` keeps their head, and pads as a training does; one of the two tokens is needed."""
    base = tiny("llama", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(base, num_labels=1, pad_token_id=tokenizer.eos_token_id)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS"))
    run = saved(adapted, base, tmp_path / "run")
    assert main(["merge", str(run), str(run / "model")]) == 0
    merged = kind.from_pretrained(run / "model", dtype=torch.float32)
    rewards = merged(torch.arange(3, 20)[None]).logits
    torch.testing.assert_close(rewards, adapted.eval()(torch.arange(3, 20)[None]).logits)
    assert rewards.shape == (1, 1)
    made = transformers.AutoTokenizer.from_pretrained(run / "model")
    assert tokenizer.pad_token is None
    assert merged.config.pad_token_id == made.pad_token_id == tokenizer.eos_token_id
    tokenizer.eos_token = None
    for folder in (base, run / "adapter"):
        tokenizer.save_pretrained(folder)
    assert main(["merge", str(run / "adapter"), str(run / "other")]) == 1
    assert "neither a token of padding nor an end token" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="neither a token of padding nor an end token"):
        trained_model_of(str(base), is_reward=True)
