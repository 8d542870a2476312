"""`python -m model_center certify`: what a training would learn, beside what it should."""

from __future__ import annotations

import argparse

import bmtrain as bmt
from bmtrain.errors import printable
from model_center.arguments import positive
from model_center.commands import train
from model_center.dataset.packing import PackedSamples
from model_center.dataset.preferences import PreferencePairs
from model_center.errors import ConfigError
from model_center.training.certificate import Certificate, certify
from model_center.training.objectives import Preference, goal_of

SHOWN = 10  # differences


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`: those of `train`, and `--steps`."""
    train.add_arguments(parser)
    parser.description = (
        "Take steps of a training as it would take them (template, packing, loss mask, ranks, "
        "accumulation), and compare the weight of each token in the loss, its position and what it "
        "sees with the same conversations one by one. Computed in fp32 without dropout; nothing is "
        "trained. The exit status is 1 if anything differs. Flags are those of train."
    )
    parser.add_argument(
        "--steps", type=positive, default=2, metavar="K", help="that are taken (default: 2)"
    )


def run(args: argparse.Namespace) -> None:
    """Print the certificate; the exit status says whether anything differs.

    Raises:
        ConfigError, DataError, IdentifierError, WeightsError: as `train`.
    """
    if args.load_in_4bit:
        raise ConfigError("certify computes in fp32: leave --load-in-4bit out.")
    args.dtype = "fp32"
    prepared = train.prepare(args)
    if prepared is None:
        return
    packed = prepared.packed
    if not isinstance(packed, PackedSamples | PreferencePairs):
        raise ConfigError(
            "certify computes texts one by one, but with --packing concatenated they see one "
            "another: use --packing separate."
        )
    goal = goal_of(prepared.trained_model, args)
    if isinstance(goal, Preference) and isinstance(packed, PreferencePairs):
        goal.add_reference(packed, args.dataset_name)
    found = certify(goal, packed, args, args.steps)
    if bmt.rank() == 0:
        print(printable("\n".join(lines(found))), flush=True)
    raise SystemExit(1 if found.findings else 0)


def lines(found: Certificate) -> list[str]:
    """What was compared and what differs, in words."""
    said = [
        f"compared: {found.steps} steps on {bmt.world_size()} ranks, {found.conversations:,} "
        f"samples, {found.tokens:,} tokens, {found.loss_tokens:,} in the loss"
    ]
    if found.unknown:
        said.append(
            f"nothing can be said of {len(found.unknown)} samples, the first {found.unknown[0]}: "
            "the template refuses other contents in their place"
        )
    if not found.findings:
        said.append(
            "no difference: each token in the loss weighs the same in its step (up to "
            f"{found.deviation:.0e}), has the position and sees what it sees alone"
        )
    else:
        said.append(
            f"{len(found.findings)} differences; of each sample the first text that is left out "
            "and the first token that differs:"
        )
        said += [f"  {place}: {text}" for place, text in found.findings[:SHOWN]]
    return said
