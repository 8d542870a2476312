"""`python -m model_center train`: what is learnt, what comes out, and what is refused."""

import argparse
import contextlib
import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from tests.data_sets.common import tokenizer as stored
from tests.data_sets.common import write_rows
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import (
    COMMAND,
    DATA,
    TINY,
    command,
    losses,
    on,
    results,
    same_learning,
    tiny,
    words_of,
)
from tests.training.lm_programs import main as run_program

import bmtrain as bmt
from bmtrain.runtime import world
from model_center.__main__ import main as model_center
from model_center.commands import train as command_module
from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.mixture import Mixture, MixturePart, set_aside, weighted
from model_center.dataset.packing import PackedSamples
from model_center.errors import ConfigError, DataError, ResumeError
from model_center.model import Llama
from model_center.tokenizer import GPT2Tokenizer
from model_center.training.metrics_file import read_metrics

CHAT = DATA / "chat"
# peft calls transformers so
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tiny models are made here."""
    return tmp_path_factory.mktemp("lm")


def adapted_answers(model, adapter, ids):
    """Logits of transformers' model with the adapter that the program wrote."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(base, adapter).eval()(ids).logits
    return logits


def restored_answers(model, run, targets, ids):
    """Logits of our model with adapters, from the run's checkpoint."""
    ours = Llama.from_pretrained(model, dtype=torch.float32)
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, lora_alpha=64, target_modules=targets), ours)
    bmt.BMTrainModelWrapper(ours)
    names = [name for name, _ in ours.named_parameters() if ".lora_" in name]
    bmt.load(ours, str(max(Path(run).glob("step-*"))), only=names)
    with torch.no_grad():
        logits = ours.eval()(ids).logits
    return logits


ATTENTION = ["project_q", "project_k", "project_v", "attention_out"]
THEIRS = "q_proj k_proj v_proj o_proj"


@pytest.mark.parametrize(
    ("targets", "epochs", "ours", "theirs"),
    [
        ("--lora-targets q_proj w_out", 2, ["project_q", "w_out"], "q_proj down_proj"),
        pytest.param("", 12, ATTENTION, THEIRS, marks=pytest.mark.long),
        pytest.param(
            "--lora-targets all-linear",
            2,
            [*ATTENTION, "w_0", "w_1", "w_out"],
            f"{THEIRS} gate_proj up_proj down_proj",
            marks=pytest.mark.long,
        ),
    ],
    ids=["named", "attention", "all"],
)
def test_llama_learns_by_lora(targets, epochs, ours, theirs, folder, tmp_path):
    """The loss falls, the model's own weights stay, and the adapter does in transformers what it
    does here.
    """
    model = tiny("llama", folder)
    how = f"--batch-size 2 --lr 1e-2 --epochs {epochs} --lora-rank 8 --lora-alpha 64 {targets}"
    command(*on(model), how, "--validation", CHAT / "val.jsonl", "--save", tmp_path)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.05 * epochs
    measured = results(tmp_path, "validation_loss")
    assert len(measured) == epochs and measured[-1] < measured[0]
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(written["target_modules"]) == set(theirs.split())
    ids = torch.arange(3, 25)[None]
    expected = adapted_answers(str(model), str(tmp_path / "adapter"), ids)
    (found,) = run_ranks(restored_answers, 1, str(model), str(tmp_path), ours, ids)
    # Sums are rounded by the size of their summands: next to zero, too, by that of the largest.
    torch.testing.assert_close(expected, found, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    with torch.no_grad():
        plain = Llama.from_pretrained(model, dtype=torch.float32).eval()(ids).logits
    assert (found - plain).abs().max() > 0.01


FORMS = (
    "--moments 8bit",
    "--master-weights split",
    "--moments 8bit --master-weights none",
    "--moments 8bit --optimizer offload --device-states auto",
)


def learn_in_all_forms(arguments, folder):
    """On a rank: a run of four steps, and one that is ended after two and goes on; of the last form
    what other forms would do.
    """

    def train(save, words):
        world.shutdown()
        run_program(COMMAND, [*arguments, *words.split(), "--save", str(save)])

    for number, form in enumerate(FORMS):
        path = Path(folder, str(number))
        train(path / "whole", f"--train-iters 4 {form}")
        train(path / "parts", f"--train-iters 2 {form}")
        train(path / "parts", f"--train-iters 4 --resume {form}")
    for form, said in (("", "moments was 8bit and is fp32"), (FORMS[1], "and is split; moments")):
        with pytest.raises(ResumeError, match=rf"{said}.*Remedy: give the same arguments"):
            train(path / "parts", f"--train-iters 6 --resume {form}")


@pytest.mark.long
def test_small_states_of_adam(folder, tmp_path):
    """They learn, each form in its own way wherever the states are; a run goes on bit by bit, and
    in no other form.
    """
    words = words_of(*on(tiny("qwen3", folder)), "--dtype bf16 --batch-size 2 --epochs 9")
    run_ranks(learn_in_all_forms, 2, words, str(tmp_path), join=False)
    curves = []
    for number in range(len(FORMS)):
        same_learning(tmp_path / str(number) / "parts", tmp_path / str(number) / "whole")
        curves.append(losses(tmp_path / str(number) / "whole"))
        assert curves[-1][-1] < curves[-1][0] - 0.1
    assert len({tuple(curve) for curve in curves[:3]}) == 3 and curves[3] == curves[0]


def go_on_with_other_data(model, folder):
    """On a rank: two steps, and two more on other rows: refused, and asked for."""

    def train(number, words):
        data = Path(folder, f"{number}.jsonl")
        rows = [{"prompt": f"{n}?", "response": f"{number} " * (n + 1)} for n in range(6 + number)]
        write_rows(data, *rows)
        world.shutdown()
        chosen = ["--model-config", model, "--data", str(data), "--save", f"{folder}/run"]
        run_program(COMMAND, [*chosen, *TINY.split(), "--max-length", "48", *words.split()])

    train(0, "--batch-size 1 --train-iters 2 --resume")
    with pytest.raises(ResumeError, match=r"dataset was .*--continue-with-other-data accepts"):
        train(1, "--batch-size 1 --resume")
    train(1, "--batch-size 1 --epochs 2 --resume --continue-with-other-data")
    train(1, "--batch-size 1 --epochs 2 --resume")  # it has ended


def test_a_run_on_other_data(folder, tmp_path):
    """Steps are counted on, the rows begin anew; the record says how many tokens were learnt."""
    model = tiny("gpt2", folder)
    run_ranks(go_on_with_other_data, 1, str(model), str(tmp_path), join=False)
    tokenizer = GPT2Tokenizer.from_pretrained(model)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    packed = PackedSamples(InstructionDataset(tmp_path / "1.jsonl", tokenizer, 48), 48)
    assert [one["step"] for one in records] == [*range(1, 2 * len(packed) + 3)]
    assert [one["epoch"] for one in records] == [0, 0, *[0] * len(packed), *[1] * len(packed)]
    items = [packed[number] for number in range(len(packed))]
    learnt = sum(int((item["targets"] != -100).sum()) for item in items)
    assert records[-1]["loss_tokens"] - records[1]["loss_tokens"] == 2 * learnt
    tokens = sum(len(item["input_ids"]) for item in items)
    assert records[-1]["tokens"] - records[1]["tokens"] == 2 * tokens
    assert all(0 < one["unpadded_tokens_per_second"] <= one["tokens_per_second"] for one in records)


def unread(words):
    """The command where standard output cannot be written."""
    with open("/dev/full", "w", encoding="utf-8") as full, contextlib.redirect_stdout(full):
        run_program(COMMAND, words)


def test_what_is_shown_of_data(folder, tmp_path, capsys):
    """Nothing of a row controls the terminal; output that nobody can write ends no run; a record
    that cannot be begun is refused by its name.
    """
    row = {"prompt": "a\x1b]0;b\x07", "response": "c\x1b[2J"}
    rows = write_rows(tmp_path / "rows.jsonl", row)
    model = tiny("qwen3", folder)
    command(*on(model, rows), "--look 1", ranks=1)
    text = capsys.readouterr().out
    assert "\\u001b]0;b\\u0007" in text and "\x1b" not in text
    few = (*on(model), "--epochs 9 --train-iters 2")
    run_ranks(unread, 1, words_of(*few, "--save", tmp_path / "run"), join=False)
    assert [one["step"] for one in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    (tmp_path / "log" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"record of the run cannot be written into .*log: Is a"):
        command(*few, "--log-dir", tmp_path / "log", ranks=1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "measured"),
    [
        ("--batch-size 2 --eval-iters 2 --save-iters 2", [2, 4]),
        ("--batch-size 1 --gradient-accumulation 99 --save-iters 1", [1, 2, 3, 4, 5]),
    ],
)
def test_each_measurement_survives_a_resume(folder, form, measured, tmp_path):
    """One that a kill after the checkpoint has prevented, every few steps or at the end of a pass:
    each is in the record once, with the values of a run that was not interrupted.
    """
    words = on(tiny("qwen3", folder)), "--epochs 9 --validation-share 0.3 --resume --save"
    every = (*words[0], form, words[1])
    command(*every, tmp_path / "whole", "--train-iters 5")
    parts = tmp_path / "parts"
    command(*every, parts, "--train-iters 4")
    record = parts / "metrics.jsonl"
    lines = record.read_text().splitlines(keepends=True)
    assert "validation_loss" in lines[-1]
    record.write_text("".join(lines[:-1]))
    command(*every, parts, "--train-iters 5")
    command(*every, parts, "--train-iters 5")
    found = [
        [(one["step"], one.get("loss"), one.get("validation_loss")) for one in read_metrics(path)]
        for path in (record, tmp_path / "whole" / "metrics.jsonl")
    ]
    assert found[0] == found[1]
    assert [step for step, loss, _ in found[0] if loss is None] == measured


def with_room(num_bytes, complaint, *words):
    """On a rank: a run into a folder with so much room."""
    with pytest.MonkeyPatch.context() as patch:
        room = argparse.Namespace(free=num_bytes)
        patch.setattr("model_center.commands.train.shutil.disk_usage", lambda _: room)
        with pytest.raises(ConfigError, match=complaint) if complaint else contextlib.nullcontext():
            run_program(COMMAND, words_of(*words))


def test_a_disk_without_room_for_the_model(folder, tmp_path):
    """Known before the first step; adapters need less."""
    words = [*on(tiny("qwen3", folder)), "--train-iters 1 --save", tmp_path]
    complaint = r"100,000 bytes are free there, and what is trained takes 8\d\d,\d{3} in the end"
    run_ranks(with_room, 2, 100_000, complaint, *words, join=False)
    assert not (tmp_path / "model").exists() and losses(tmp_path) == []
    run_ranks(with_room, 2, 100_000, None, *words, "--lora-rank 4", join=False)
    assert (tmp_path / "adapter").exists() and len(losses(tmp_path)) == 1


def test_fewer_validation_rows_than_ranks(folder, tmp_path):
    """A rank without one measures a row of which nothing is in the loss: the value is that of one
    process.
    """
    row = {"prompt": "What is 2 plus 2?", "response": "4, as always."}
    words = [*on(tiny("qwen3", folder)), "--lr 1e-30 --train-iters 1 --validation"]
    words.append(write_rows(tmp_path / "one.jsonl", row))
    for ranks in (1, 2):
        save = tmp_path / str(ranks)
        command(*words, "--save", save, ranks=ranks)
    one, two = (results(tmp_path / name, "validation_loss") for name in ("1", "2"))
    assert one == pytest.approx(two, rel=1e-5) and len(one) == 1


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_families_learn(family, folder, tmp_path):
    """All weights, with a share set aside and answers in the log; what is written is the family's
    model and tokenizer in transformers.
    """
    arguments = "--batch-size 2 --epochs 6 --validation-share 0.2 --eval-iters 2 --samples 1 --save"
    command(*on(tiny(family, folder), "train.jsonl", "alpaca.jsonl:0.5"), arguments, tmp_path)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.3
    records = [one for one in read_metrics(tmp_path / "metrics.jsonl") if "perplexity" in one]
    assert [one["step"] for one in records] == [2 * n for n in range(1, len(records) + 1)]
    for one in records:
        expected = torch.tensor(one["validation_loss"]).exp().item()
        assert expected == pytest.approx(one["perplexity"], rel=1e-5)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == family
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    talk = [{"role": "user", "content": "Why?"}]
    asked = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert asked == "<|endoftext|>### User:\nWhy?\n\n### Assistant:\n"


def test_weights_from_scratch_and_plain_texts(folder, tmp_path):
    """Texts are learnt as a whole; the model's own weights are not read."""
    texts = [{"text": f"A row, number {n}."} for n in range(20)]
    words = on(tiny("gpt2", folder), write_rows(tmp_path / "texts.jsonl", *texts))
    words += ["--batch-size 4 --seed 5 --save", tmp_path]
    command(*words, "--epochs 2 --from-scratch")
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 0.3
    command(*words, "--train-iters 1", "--save", tmp_path / "pretrained")
    assert losses(tmp_path)[0] != losses(tmp_path / "pretrained")[0]


def test_shares_of_files():
    """Each sample as often as its file's weight says, the same ones for the same seed, and none
    both learnt and set aside.
    """
    samples = InstructionDataset(CHAT / "train.jsonl", stored("gpt2"), 64)
    part = MixturePart(samples, range(len(samples)))
    rest, aside = set_aside(part, 0.3, 7)
    assert sorted([*rest.numbers, *aside.numbers]) == list(range(11)) and len(aside.numbers) == 3
    assert set_aside(part, 0.3, 7) == (rest, aside) != set_aside(part, 0.3, 8)
    assert set_aside(part, 0.0, 7)[1].numbers == []
    assert len(set_aside(part, 0.01, 7)[1].numbers) == 1
    counts = [list(weighted(rest, 2.5, 7).numbers).count(number) for number in rest.numbers]
    assert sorted(counts) == [2] * 4 + [3] * 4
    mixture = Mixture([weighted(rest, 0.5, 7), aside])
    assert len(mixture) == 4 + 3
    for place, number in enumerate([*weighted(rest, 0.5, 7).numbers, *aside.numbers]):
        assert torch.equal(mixture[place]["input_ids"], samples[number]["input_ids"])
    with pytest.raises(DataError, match="all data sets are empty"):
        Mixture([MixturePart(samples, [])])


@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ("--lora-rank 4 --lora-targets q_pro", ConfigError, r"--lora-targets 'q_pro' \(nearest: "),
        ("--master-weights split --dtype fp16", ConfigError, "is for weights in bf16"),
        ("--device-states 2", ConfigError, "goes with --optimizer adam-offload"),
        ("--validation x --validation-share 0.1", ConfigError, "exclude each other"),
        ("--resume", ConfigError, "--resume reads the checkpoints in --save"),
        ("--data nowhere.jsonl", DataError, "there is no file nowhere.jsonl"),
        ("--data nowhere.jsonl:-1", DataError, "expected NAME or NAME:WEIGHT, the weight above 0"),
        ("--model-config bert", ConfigError, "bert is a Bert: expected a CausalModel"),
    ],
)
def test_bad_arguments_are_named(arguments, error, complaint, folder):
    """On every rank, before the first step."""
    given = arguments.replace("--model-config bert", f"--model-config {tiny('bert', folder)}")
    with pytest.raises(error, match=complaint):
        command(*on(tiny("llama", folder)), given, ranks=1)


def test_the_command_line(capsys):
    """Errors are a line, and all flags are explained."""
    assert model_center(["train", "--model-config", "x"]) == 1
    assert "error: this program needs --data" in capsys.readouterr().err
    parser = argparse.ArgumentParser()
    command_module.add_arguments(parser)
    assert all(action.help for action in parser._actions)
