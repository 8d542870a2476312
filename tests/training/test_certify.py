"""`python -m model_center certify`: nothing differs of what is right, and each planted fault is
found at the token where it begins.
"""

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.data_sets.common import write_rows
from tests.data_sets.test_instructions import END, LOOP, QWEN3, turns
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import DATA, tiny
from tests.training.their_models import arguments, make

import bmtrain as bmt
from bmtrain.runtime import world
from model_center.__main__ import main
from model_center.dataset.chat import ChatRenderer
from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.mixture import Mixture, MixturePart
from model_center.dataset.packing import PackedSamples
from model_center.dataset.preferences import PreferencePairs
from model_center.training.certificate import certify
from model_center.training.objectives import NextToken, Objective, Preference, goal_of
from model_center.training.trained_model import TrainedModel, trained_model_of

CHAT = DATA / "chat" / "train.jsonl"
# Without the system, and always with the invitation to an answer.
PLAIN = QWEN3.replace("<|im_start|>", "<").replace("<|im_end|>", END)
NO_SYSTEM = PLAIN.replace(
    "{%- else %}\n        {{-", "{%- elif message.role == 'user' %}\n        {{-"
)
ALWAYS = LOOP + "<{{ message.role }}>{{ message.content }}<|endoftext|>\n{% endfor %}<assistant>\n"
TALKS = [
    {
        "messages": [
            {"role": "system", "content": f"Count {n}."},
            *turns("Up?", "One, two." + " More." * n, "On?", "Three."),
        ]
    }
    for n in range(8)
]
THOUGHT = [{"messages": turns("2+2?", "<think>\nfour it is\n</think>\n\n4", "3+3?", "6")}] * 4
Fault = Callable[[pytest.MonkeyPatch, TrainedModel], None]


def spans(change):
    """Answers that begin or end elsewhere."""

    def plant(patch, trained_model):
        right = ChatRenderer.text_and_answers

        def wrong(self, messages):
            text, found = right(self, messages)
            return text, [change(text, span) for span in found]

        patch.setattr(ChatRenderer, "text_and_answers", wrong)

    return plant


def by_prefixes(patch, trained_model):
    """An answer is what a text has more through it than before it."""

    def wrong(self, messages):
        found = [
            (len(self.text(messages[:n], answer=True)), len(self.text(messages[: n + 1])))
            for n, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        return self.text(messages), found

    patch.setattr(ChatRenderer, "text_and_answers", wrong)


def one_segment(patch, trained_model):
    """All of a row sees all before it."""
    right = trained_model.scores

    def wrong(batch):
        length = batch["input_ids"].shape[1]
        whole = {"segments": torch.ones_like(batch["segments"])}
        if (
            type(trained_model).__name__ == "TransformersModel"
        ):  # transformers finds samples by positions
            whole["position_ids"] = torch.arange(length).expand_as(batch["position_ids"])
        return right({**batch, **whole})

    patch.setattr(trained_model, "scores", wrong)


def means_of_means(patch, trained_model):
    def wrong(batches):
        for batch in batches:
            yield trained_model.loss_sum(batch) / (batch["targets"] != -100).sum() / len(batches)

    patch.setattr(NextToken, "losses", lambda _, batches: wrong(batches))


def shifted_twice(patch, trained_model):
    def wrong(batch):
        """Targets are the next ids already, and are shifted as labels are."""
        scores, _ = trained_model.scores({**batch, "targets": torch.ones_like(batch["targets"])})
        scores = scores.view(*batch["targets"].shape, -1)[:, :-1]
        targets = batch["targets"][:, 1:]
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")

    patch.setattr(trained_model, "loss_sum", wrong)


def positions_go_on(patch, trained_model):
    right = PackedSamples.__getitem__

    def wrong(self, index):
        item = right(self, index)
        return {**item, "position_ids": torch.arange(len(item["position_ids"]))}

    patch.setattr(PackedSamples, "__getitem__", wrong)


def nothing(patch, trained_model):
    pass


# The template, the rows, the fault, and what is said of it.
FAULTS = {
    "none": (PLAIN, None, nothing, None),
    "none, invited unasked": (ALWAYS, TALKS, nothing, None),
    "system": (
        NO_SYSTEM,
        TALKS,
        nothing,
        "message 1, of the system: the template leaves out 'Count ",
    ),
    "thoughts": (
        PLAIN,
        THOUGHT,
        nothing,
        "message 2, of the assistant: the template leaves out 'four it is'",
    ),
    "invitation": (
        PLAIN,
        TALKS,
        spans(lambda text, span: (text.rindex("<assistant", 0, span[0]), span[1])),
        "is in the loss, but no part of an answer",
    ),
    "end": (
        PLAIN,
        TALKS,
        spans(lambda text, span: (span[0], text.rindex(END, 0, span[1]))),
        "'<|endoftext|>', is not in the loss",
    ),
    "prefixes": (ALWAYS, TALKS, by_prefixes, "is in the loss, but no part of an answer"),
    "segments": (PLAIN, TALKS, one_segment, "sees other samples of its row"),
    "means": (PLAIN, TALKS, means_of_means, "in the loss, and should 1/"),
    "shifted": (PLAIN, TALKS, shifted_twice, "weighs in the loss, but should not be in it"),
    "positions": (PLAIN, TALKS, positions_go_on, "has the position "),
}


def certified(path, folder, names):
    """On a rank: the certificate of each fault."""
    trained_model = trained_model_of(path)
    args = arguments(Path(path), batch_size=1, gradient_accumulation=2, num_workers=0)
    trained_model.load(args)
    found = {}
    for name in names:
        template, rows, fault, _ = FAULTS[name]
        trained_model.tokenizer.chat_template = template
        file = CHAT
        if rows is not None:
            file = write_rows(Path(folder, f"{name}.{bmt.rank()}.jsonl"), *rows)
        with pytest.MonkeyPatch.context() as patch:
            fault(patch, trained_model)
            samples = InstructionDataset(file, trained_model.tokenizer, 64)
            found[name] = certify(
                goal_of(trained_model, args), PackedSamples(samples, 130, least=4), args, 1
            )
    return found


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("kind", "names"),
    [("gpt2", [*FAULTS]), ("qwen3_moe", ["none", "segments", "shifted", "means"])],
)
def test_each_planted_fault_is_found(kind, names, tmp_path):
    """At two ranks, of a model of this package and of one of transformers."""
    path = tiny(kind, tmp_path) if kind == "gpt2" else make(kind, tmp_path)
    first, second = run_ranks(certified, 2, str(path), str(tmp_path), names, timeout=200)
    for name, found in first.items():
        said, text = [one.text for one in found.findings], FAULTS[name][3]
        assert found.findings == second[name].findings
        assert found.conversations >= 4 and found.loss_tokens > 0 and not found.unknown, name
        if text is None:
            assert said == [] and found.deviation < 1e-3
        else:
            assert said and text in said[0], f"{name}: {said}"


PAIRS = [
    {
        "messages": [{"role": "system", "content": f"Count {n}."}, *turns("Up?", "One.", "On?")],
        "chosen": turns("", "Two." + " More." * n)[1],
        "rejected": turns("", "Two, I think." * (n % 3 + 1))[1],
    }
    for n in range(8)
]


def counts_rows(patch, trained_model):
    """PreferencePairs weigh by the size of their micro-batch."""
    patch.setattr(
        Preference,
        "losses",
        lambda self, batches: (
            self.loss_sum(batch) / len(batch["number"]) / len(batches) for batch in batches
        ),
    )


def sees_padding(patch, trained_model):
    right = PreferencePairs.collate

    def wrong(self, items):
        batch = right(self, items)
        return {**batch, "position_ids": batch["position_ids"].flip(1)}

    patch.setattr(PreferencePairs, "collate", wrong)


FAULTS_OF_PAIRS = {
    "none": (PLAIN, nothing, None),
    "system": (NO_SYSTEM, nothing, "message 1, of the system: the template leaves out 'Count "),
    "end": (PLAIN, FAULTS["end"][2], "'<|endoftext|>', is not in the loss"),
    "means": (PLAIN, counts_rows, "times what it should in the loss of its pair"),
    "positions": (PLAIN, sees_padding, "has the position "),
}


def certified_pairs(folder, cases):
    """On a rank: the certificate of each fault in a loss of pairs."""
    found = {}
    file = write_rows(Path(folder, f"pairs.{bmt.rank()}.jsonl"), *PAIRS)
    for kind, objective, rank, names in cases:
        args = arguments(
            Path(folder, kind), batch_size=3, gradient_accumulation=2, num_workers=0, beta=None
        )
        args.objective, args.lora_rank, args.margin, args.cache = (
            Objective(objective),
            rank,
            1,
            None,
        )
        trained_model = trained_model_of(str(Path(folder, kind)), is_reward=objective == "reward")
        trained_model.load(args)
        trained_model.adapt(args)
        for name in names:
            trained_model.tokenizer.chat_template, fault, _ = FAULTS_OF_PAIRS[name]
            with pytest.MonkeyPatch.context() as patch:
                fault(patch, trained_model)
                samples = InstructionDataset(file, trained_model.tokenizer, 64, pairs=True)
                pairs = PreferencePairs(Mixture([MixturePart(samples, range(len(PAIRS)))]))
                goal = Preference(trained_model, args)
                goal.add_reference(pairs, name)
                found[kind, objective, rank, name] = certify(goal, pairs, args, 1)
    return found


@pytest.mark.long
@pytest.mark.fresh
def test_faults_in_losses_of_pairs(tmp_path):
    """At two ranks, whose micro-batches are of 3 and of 1 pair."""
    make("gemma2", tmp_path)
    tiny("gpt2", tmp_path).rename(tmp_path / "own")
    cases = [
        ("gemma2", "dpo", 0, [*FAULTS_OF_PAIRS]),
        ("gemma2", "dpo", 4, ["none"]),
        ("own", "simpo", 0, ["none", "means"]),
        ("own", "orpo", 0, ["none", "means"]),
        ("gemma2", "reward", 0, ["none"]),
    ]
    first, second = run_ranks(certified_pairs, 2, str(tmp_path), cases, timeout=200)
    for case, found in first.items():
        said, text = [one.text for one in found.findings], FAULTS_OF_PAIRS[case[-1]][2]
        assert found.findings == second[case].findings
        assert found.conversations == 16 and not found.unknown, case
        if text is None:
            assert said == [] and found.deviation < 1e-3, case
        else:
            assert said and any(text in one for one in said), f"{case}: {said}"


def commanded(path, data):
    """On a rank: what `certify` and the first lines of `train` say."""
    words = ["--model-config", path, "--data", data, "--max-length", "64", "--dtype", "fp32"]
    said = []
    for command in (["certify", *words], ["train", *words, "--train-iters", "1"]):
        world.shutdown()
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main(command)
        said.append(out.getvalue())
    return said[0], said[1]


@pytest.mark.fresh
def test_the_commands_say_what_differs(tmp_path):
    """`certify` lists it, a run warns once, with the row; of rows that are right, nothing."""
    path = tiny("gpt2", tmp_path)
    data = write_rows(tmp_path / "talks.jsonl", *TALKS)
    ((certificate, start),) = run_ranks(commanded, 1, str(path), str(data))
    assert "no difference: each token in the loss weighs the same" in certificate
    assert "warning" not in start
    memory = re.search(r"weights (\S+) GiB, gradients (\S+) GiB, optimizer (\S+) GiB", start)
    assert memory is not None
    weights, gradients, states = map(float, memory.groups())
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert weights == gradients == pytest.approx(4 * model.num_parameters() / 2**30, rel=0.05)
    assert states == pytest.approx(2 * weights, rel=0.01)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = NO_SYSTEM
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    ((certificate, start),) = run_ranks(commanded, 1, str(path), str(data))
    lost = f"{data}, line 1: message 1, of the system: the template leaves out 'Count 0.'"
    assert f"step 1, {data}" in certificate and "of the system" in certificate
    assert (
        start.count("warning") == 1
        and f"8 of the first 8 rows have a loss mask that differs from their text. {lost}" in start
    )
