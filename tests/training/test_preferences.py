"""PreferencePairs of answers: their rows, losses and gradients beside plain PyTorch, runs and refusals."""

import argparse
import copy
import warnings
import zlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.data_sets.common import tokenizer as stored
from tests.data_sets.common import write_rows
from tests.ranks.models import full_gradients, plain_gradients
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import command, losses, on, results, same_learning, tiny
from tests.training.their_models import arguments, make

import bmtrain as bmt
from model_center.dataset.conversations import parse_pair
from model_center.dataset.instructions import InstructionDataset, TooLong
from model_center.dataset.mixture import Mixture, MixturePart
from model_center.dataset.preferences import PreferencePairs
from model_center.errors import DataError, ResumeError
from model_center.training.objectives import Objective, Preference, orpo
from model_center.training.trained_model import trained_model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
ASKED, GOOD, BAD = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "It is 22, I think."},
)
FORMS: list[dict[str, Any]] = [
    {"prompt": "2+2?", "chosen": "4", "rejected": "It is 22, I think."},
    {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD], "system": None},
    {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "score_chosen": 3.0},
    {
        "prompt": "2+2?",
        "messages": [ASKED, GOOD],
        "chosen": [ASKED, GOOD],
        "rejected": [ASKED, BAD],
    },
    {"question": "2+2?", "chosen": "4", "rejected": "It is 22, I think.", "system": ""},
    {"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "It is 22, I think."},
    {
        "conversations": [{"from": "human", "value": "2+2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "It is 22, I think."},
    },
    {"messages": [ASKED, GOOD], "rejected_response": "It is 22, I think."},
    {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD]},
    {"input": {"messages": [ASKED]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]},
    {
        "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2+2?\n\nAssistant: It is 22, I think.",
    },
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b"}, "there is no field 'rejected'"),
    ({"messages": [ASKED, GOOD]}, "there is no field 'chosen'"),
    ({"chosen": "b", "rejected": "c"}, "begins with an answer of the assistant"),
    ({"prompt": "a", "chosen": 3, "rejected": "c"}, "got 3 as chosen: expected a text"),
    (
        {"prompt": "x", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        "do not begin with the content of prompt",
    ),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 0.5}, "got margin"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x"]}, "got images"),
    (
        {"prompt": "a", "chosen": [ASKED], "rejected": [BAD]},
        "no message of the assistant is in the loss",
    ),
]


def test_rows_in_all_forms():
    for row in FORMS:
        better, worse = parse_pair(row)
        asked = {**ASKED, "weight": 0}
        assert (better.messages, worse.messages) == ([asked, GOOD], [asked, BAD]), row
    assert parse_pair(FORMS[2])[0].unread == ["score_chosen"]
    first, second = ({"role": "assistant", "content": text} for text in ("4", "5"))
    same, _ = parse_pair(
        {"chosen": [ASKED, first, ASKED, second], "rejected": [ASKED, first, ASKED, second]}
    )
    assert [message.get("weight", 1) for message in same.messages] == [0, 0, 0, 1]


@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_rows_that_are_refused(row, message, tmp_path):
    """With file and row; without it the rest is read."""
    path, tokenizer = write_rows(tmp_path / "pairs.jsonl", FORMS[0], row), stored("gpt2")
    with pytest.raises(DataError, match=rf"pairs\.jsonl, line 2.*{message}"):
        InstructionDataset(path, tokenizer, 64, pairs=True)
    write_rows(path, FORMS[0])
    assert len(InstructionDataset(path, tokenizer, 64, pairs=True)) == 2
    with pytest.raises(DataError, match="chosen: a better and a worse answer are compared by"):
        InstructionDataset(path, tokenizer, 64)


def test_pairs_that_do_not_fit(tmp_path):
    """A pair goes as a whole, and is counted as one."""
    path = tmp_path / "pairs.jsonl"
    long = {"prompt": "a", "chosen": "b", "rejected": "c " * 90}
    write_rows(path, long, FORMS[0])
    read = [
        InstructionDataset(path, stored("gpt2"), 64, how, pairs=True)
        for how in TooLong
        if how is not TooLong.REFUSE
    ]
    assert [(one.num_rows, len(one), one.num_cut, one.num_dropped) for one in read] == [
        (2, 4, 1, 0),
        (2, 2, 0, 1),
    ]
    with pytest.raises(DataError, match=r"line 1.*1 of 2 rows have more than 64"):
        InstructionDataset(path, stored("gpt2"), 64, TooLong.REFUSE, pairs=True)
    kept = PreferencePairs(Mixture([MixturePart(read[1], range(2))]))
    targets = kept[0]["worse_targets"]
    assert kept.rows == [[0, 1]] and targets[targets != -100][-1] == stored("gpt2").eos_token_id


def test_orpo_at_both_ends():
    """Finite where the plain formula is not, and equal to it in fp64."""
    x = torch.tensor([-1e-6, -0.5, -0.7, -30.0], requires_grad=True)
    y = torch.tensor([-2.0, -1e-6, -9.0, -1e-3])
    odds = [value.double() - torch.log1p(-torch.exp(value.double())) for value in (x, y)]
    expected = -x.double() - 0.1 * F.logsigmoid(odds[0] - odds[1])
    found = orpo(x, y, 0.1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    (want,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_bias", [False, True])
def test_token_log_probs(with_bias):
    """Values and gradients; 0 in rows to ignore."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    bias = torch.randn(31, requires_grad=True) if with_bias else None
    target, scale = torch.randint(0, 31, (20,)), torch.randn(20)
    target[3] = -100
    inputs = [hidden, weight, *([] if bias is None else [bias])]
    found = bmt.loss.token_log_probs(hidden, weight, target, bias)
    got = torch.autograd.grad((found * scale).sum(), inputs)
    every = F.linear(hidden, weight, bias).log_softmax(-1)
    expected = every.gather(1, target.clamp(min=0)[:, None])[:, 0] * (target != -100)
    want = torch.autograd.grad((expected * scale).sum(), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def write_pairs(path):
    rows = (
        {
            "prompt": f"What is {n % 4} plus {n // 4}?",
            "chosen": f"It is {n % 4 + n // 4}.",
            "rejected": f"{n}" + " or so" * (n % 3),
        }
        for n in range(12)
    )
    return write_rows(path, *rows)


def plain_loss(kind, model, base, pairs, numbers):
    """In one process, every answer alone, by the papers' formulas."""

    def score(own, ids, targets, *, mean):
        every = own(input_ids=ids[None]).logits
        if kind is Objective.REWARD:
            return every[0, 0]
        learnt = targets != -100
        found = every[0, learnt].log_softmax(-1).gather(1, targets[learnt][:, None])
        return found.mean() if mean else found.sum()

    total = torch.zeros(())
    for number in numbers:
        item = pairs[number]
        sides = [(item[side], item[f"{side}_targets"]) for side in ("better", "worse")]
        a, b = (score(model, *side, mean=kind is not Objective.DPO) for side in sides)
        if kind is Objective.DPO:
            with torch.no_grad():
                c, d = (score(base, *side, mean=False) for side in sides)
            total = total - F.logsigmoid(0.1 * (a - c - (b - d)))
        elif kind is Objective.ORPO:
            odds = torch.log(a.exp() / (1 - a.exp()) / (b.exp() / (1 - b.exp())))
            total = total - a - 0.1 * F.logsigmoid(odds)
        else:
            total = total - F.logsigmoid(2 * (a - b) - 1 if kind is Objective.SIMPO else a - b)
    return total / len(numbers)


def _moved(model, *, only_adapters):
    """Others than the reference's values, the same on all ranks and beside them."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".lora_" in name or not only_adapters:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                param.add_(torch.randn(param.shape, generator=generator) * 0.05)


def compare(folder, data, case):
    """On a rank: loss and gradients of two micro-batches of unequal size."""
    warnings.simplefilter("ignore")  # some of transformers' own
    name, objective, rank = case
    kind, path = Objective(objective), Path(folder, name)
    args = arguments(path, lora_rank=rank, objective=kind, beta=None, margin=1.0, samples=0)
    args = argparse.Namespace(**{**vars(args), "cache": None, "batch_size": 2})
    trained_model = trained_model_of(str(path), is_reward=kind is Objective.REWARD)
    trained_model.load(args)
    samples = InstructionDataset(data, trained_model.tokenizer, 64, pairs=True)
    pairs = PreferencePairs(Mixture([MixturePart(samples, range(samples.num_rows))]))
    auto = (
        transformers.AutoModelForSequenceClassification
        if kind is Objective.REWARD
        else transformers.AutoModelForCausalLM
    )
    base: Any = auto.from_pretrained(
        path, dtype=torch.float32, **({"num_labels": 1} if kind is Objective.REWARD else {})
    ).eval()
    trained_model.adapt(args)
    goal = Preference(trained_model, args)
    goal.add_reference(pairs, "pairs")
    model = copy.deepcopy(base)
    if rank:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(r=rank, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"),
        )
        for x in (model, trained_model.model):
            with torch.no_grad():
                for one in (p for n, p in x.named_parameters() if ".lora_" in n):
                    one.zero_()
    if kind is Objective.REWARD:  # its head has first values that no file has
        model.score.weight.data.copy_(trained_model.model.get_parameter("score.weight").detach())
    for x in (model, trained_model.model):
        _moved(x, only_adapters=rank > 0)
    goal.begin()
    numbers = list(range(7))
    own = numbers[bmt.rank() :: bmt.world_size()]
    batches = [pairs.collate([pairs[n] for n in some]) for some in (own[:1], own[1:])]
    mean = bmt.loss.TokenMean(goal.counted(batch) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = mean(goal.loss_sum(batch))
        (loss / bmt.world_size()).backward()  # as an OptimManager does: ranks add up
        total += float(bmt.sum_loss(loss.detach()))
    expected = plain_loss(kind, model.eval(), base, pairs, numbers)
    expected.backward()
    assert total == pytest.approx(float(expected), rel=1e-5), case
    want = {n: g for n, g in plain_gradients(model).items() if g is not None}
    got = {n: g for n, g in full_gradients(trained_model.model).items() if g is not None}
    if name == "qwen3" and kind is not Objective.REWARD:  # of this package, under names of its own
        want, got = (
            {"head": x[n]} for x, n in ((want, "lm_head.weight"), (got, "output_projection.weight"))
        )
    assert sorted(got) == sorted(want)
    for one, grad in want.items():
        limit = 1e-4 * max(float(g.abs().max()) for g in want.values())
        assert float((got[one] - grad).abs().max()) <= limit, (case, one)


def all_cases(folder, data, cases):
    for case in cases:
        compare(folder, data, case)


CASES = [
    ("olmo2", "dpo", 0),
    ("gemma2", "simpo", 0),  # bounds its scores
    ("olmo2", "dpo", 4),
    ("qwen3", "reward", 0),
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, CASES),
        pytest.param(1, CASES, marks=pytest.mark.long),
        pytest.param(
            2,
            [("olmo2", "orpo", 0), ("olmo2", "simpo", 4), ("gemma2", "orpo", 4)],
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.fresh
def test_losses_and_gradients(ranks, cases, tmp_path):
    """Against transformers' model in one process, each answer alone."""
    for kind in {kind for kind, *_ in cases}:
        make(kind, tmp_path)
    data = write_pairs(tmp_path / "pairs.jsonl")
    run_ranks(all_cases, ranks, str(tmp_path), str(data), cases, timeout=180)


@pytest.mark.long
@pytest.mark.parametrize(
    "how",
    ["--objective dpo", "--objective dpo --lora-rank 4 --lora-dropout 0.1", "--objective reward"],
)
def test_a_run_goes_on_bit_by_bit(how, tmp_path):
    """Also where the reference's log-probabilities are computed anew; it learns which is better."""
    data = write_pairs(tmp_path / "pairs.jsonl")
    words = on(tiny("qwen3", tmp_path), data)
    words += ["--batch-size 2 --epochs 3 --validation-share 0.2 --save-iters 2", how, "--save"]
    command(*words, tmp_path / "whole", "--train-iters 5")
    command(*words, tmp_path / "parts", "--train-iters 3")
    for file in (tmp_path / "parts" / "tokens").glob("reference-*"):
        file.unlink()
    command(*words, tmp_path / "parts", "--train-iters 5 --resume")
    same_learning(tmp_path / "parts", tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    assert results(tmp_path / "whole", "accuracy")[-1] == 1.0
    if how == "--objective dpo":
        assert losses(tmp_path / "whole")[0] == pytest.approx(0.693147, abs=1e-5)
        with pytest.raises(ResumeError, match="dataset was"):
            command(*on(words[1]), "--resume --save", tmp_path / "parts")
    else:
        kind: Any = (
            transformers.AutoModelForSequenceClassification
            if "reward" in how
            else transformers.AutoModelForCausalLM
        )
        path = tmp_path / "whole" / ("model" if "reward" in how else "adapter")
        made = kind.from_pretrained(path)
        assert "reward" not in how or made.config.num_labels == 1
