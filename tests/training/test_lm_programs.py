"""The programs of examples/language_models: each learns what it is for, or at least runs through,
on two ranks.
"""

import json

import pytest
import safetensors.torch
import torch
import transformers
from tests.data_sets.common import write_tokens
from tests.training.lm_programs import DATA, TINY, losses, module, results, tiny, train

from model_center.__main__ import main as command
from model_center.errors import IdentifierError
from model_center.model import Bert
from model_center.tokenizer import CPM2Tokenizer
from model_center.training.metrics_file import read_metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models are made here."""
    return tmp_path_factory.mktemp("lm")


def on(model, data=DATA):
    """Arguments that say which model and which data."""
    return ["--model-config", model, "--base-path", data, TINY]


@pytest.mark.long
def test_gpt2_learns_boolq(folder, tmp_path):
    """The words of the answers, and the texts of the prompts."""
    arguments = "--dataset BoolQ --batch-size 5 --gradient-accumulation 2 --epochs 4 --save"
    train("finetune_gpt2", *on(tiny("gpt2", folder)), arguments, tmp_path)
    assert len(losses(tmp_path)) == 40, "two micro-batches of 5 rows on two ranks, of 200 rows"
    assert results(tmp_path, "accuracy")[-1] > 0.85


@pytest.mark.long
def test_bert_learns_boolq(folder, tmp_path):
    """From chance to nearly all right, on data that tell the answer; the model is written as
    transformers reads it. Of an unknown task the nearest one is named.
    """
    arguments = "--dataset_name BoolQ --batch-size 10 --epochs 3 --save"
    train("finetune_bert", *on(tiny("bert", folder)), arguments, tmp_path)
    accuracy = results(tmp_path, "accuracy")
    assert len(accuracy) == 3 and accuracy[-1] > 0.85
    assert losses(tmp_path)[-1] < 0.6 < losses(tmp_path)[0]
    ours = Bert.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(5, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
    assert torch.load(tmp_path / "model" / "head.pt")["weight"].shape == (2, 64)
    words = r"there is no task 'BoolK' for this model.*Did you mean 'BoolQ'"
    with pytest.raises(IdentifierError, match=words):
        train("finetune_bert", *on(tiny("bert", folder)), "--dataset_name BoolK", ranks=1)


@pytest.mark.long
def test_t5_learns_to_answer(folder, tmp_path):
    """SQuAD: questions that it has seen are answered; at the start none is."""
    content = json.loads((DATA / "squad" / "train-v1.1.json").read_text("utf-8"))
    (tmp_path / "squad").mkdir()
    for split, times in (("train", 12), ("dev", 1)):
        text = json.dumps({"data": content["data"] * times})
        (tmp_path / "squad" / f"{split}-v1.1.json").write_text(text, "utf-8")
    arguments = "--lr 2e-3 --batch-size 4 --epochs 6 --max-decoder-length 12 --save"
    run = tmp_path / "run"
    train("finetune_t5_squad", *on(tiny("t5", folder), tmp_path), arguments, run)
    for name in ("exact_match", "f1"):
        scores = results(run, name)
        assert scores[0] < 0.1 and max(scores[-2:]) > 0.4, (name, scores)
    assert losses(run)[-1] < 0.5 < losses(run)[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "family", "task", "metrics"),
    [
        ("bert", "bert", "COPA", "accuracy"),
        ("bert", "bert", "CB", "accuracy macro_f1"),
        ("llama", "llama", "MultiRC", "accuracy f1 exact_match"),
        ("t5_superglue", "t5", "ReCoRD", "f1 exact_match"),
        ("cpm1", "cpm1", "LCQMC", "accuracy"),
        ("cpm2", "cpm2", "LCQMC", "accuracy"),
    ],
)
def test_other_tasks(program, family, task, metrics, folder, tmp_path):
    """A few steps, and an evaluation."""
    arguments = f"--dataset_name {task} --batch-size 3 --train-iters 3 --save"
    train(f"finetune_{program}", *on(tiny(family, folder)), arguments, tmp_path)
    assert len(losses(tmp_path)) in (2, 3)
    for metric in metrics.split():
        found = results(tmp_path, metric)
        assert found and all(0 <= value <= 1 for value in found)


def tokens(folder, family):
    """Token data for a model of this family, made of the small texts, under the name "tokens"."""
    model, prefix = tiny(family, folder), folder / family / "tokens"
    text = DATA / "corpus" / ("english.txt" if family == "gpt2" else "chinese.txt")
    options = {"gpt2": "--append-eod", "cpm1": "--preset cpm1"}
    if family in options:
        words = f"preprocess --input {text} --tokenizer {model} --output {prefix}"
        assert command(f"{words} {options[family]}".split()) == 0
        return
    tokenizer = CPM2Tokenizer.from_pretrained(model)
    gap = tokenizer.get_sentinel_id(0)
    rows = [tokenizer.encode(line) for line in text.read_text("utf-8").splitlines()]
    pairs = {
        "context": [[*ids[: len(ids) // 2], gap] for ids in rows],
        "target": [[gap, *ids[len(ids) // 2 :], tokenizer.eod_id] for ids in rows],
    }
    for name, sequences in pairs.items():
        write_tokens(f"{prefix}_{name}", [sequences], marked=0)


@pytest.mark.long
@pytest.mark.parametrize(("family", "length"), [("gpt2", 64), ("cpm1", 128), ("cpm2", 512)])
def test_training_from_scratch(family, length, folder, tmp_path):
    """The loss falls from that of knowing nothing."""
    tokens(folder, family)
    how = f"--dataset_name tokens --max-length {length} --batch-size 4 --epochs 3 --save"
    train(f"pretrain_{family}", *on(tiny(family, folder), folder / family), how, tmp_path)
    assert losses(tmp_path)[0] > 5.5
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 1
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.long
def test_weights_from_elsewhere(folder, tmp_path):
    """--load goes before the folder's weights, and --start-step says how many steps those have
    behind them.
    """
    other, run = tmp_path / "other", tmp_path / "run"
    module("tiny_model").make("gpt2", other, seed=1)
    tokens(folder, "gpt2")
    how = "--dataset_name tokens --max-length 64 --batch-size 4 --lr 0 --start-step 5"
    places = ["--train-iters 6 --load", other, "--save", run]
    train("pretrain_gpt2", *on(tiny("gpt2", folder), folder / "gpt2"), how, *places)
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [6]
    files = [path / "model.safetensors" for path in (run / "model", other)]
    got, want = map(safetensors.torch.load_file, files)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.long
def test_other_ways_to_compute(folder, tmp_path):
    """fp16 with a loss scale that finds its size, states in host memory, no recomputation, and
    curves.
    """
    how = (
        "--dtype fp16 --optimizer adam-offload --zero-level 2 --no-use-checkpoint "
        "--curves tensorboard --peak-tflops 0.5 --log-dir"
    )
    arguments = "--dataset_name BoolQ --batch-size 8 --train-iters 4 --inspect-iters 4"
    train("finetune_bert", *on(tiny("bert", folder)), arguments, how, tmp_path)
    scales = results(tmp_path, "loss_scale")
    assert all(0 < share < 1 for share in results(tmp_path, "mfu"))
    assert scales[0] == 65536 and len(scales) == 4 and scales == sorted(scales, reverse=True)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("events.")]
