"""Train a GPT-2, sharded over all processes.

    torchrun --standalone --nproc_per_node=2 examples/gpt2/train.py

Stop it whenever you like and start it again: it resumes from its last checkpoint. `--help` lists
what can be changed. Read `run`, then `train_step`; the rest is called from there.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic as torch_deterministic

import bmtrain as bmt
from bmtrain.errors import ConfigurationError
from bmtrain.runtime.process import Exit
from corpus import DataError
from data import Position, TokenData, TrainingSequences, rank_position
from evaluation import batch_loss, show_sample, validate
from model_center.errors import ResumeError
from model_center.training.checkpoints import Checkpoints
from model_center.training.flops import peak_flops
from model_center.training.non_finite_cause import cause_lines, find_cause, non_finite_error
from model_center.training.resuming import check_same_run, load_state, model_path
from model_center.training.run_log import OnStep, StepReport
from model_center.training.stop import StopRequest
from models import GPT
from options import DTYPES, Options, parse_options
from report import Report
from together import prepare_data

REMEDY = (
    "give the same arguments to resume, another --save-dir to keep both, or --restart to start over"
)

WHAT_NEXT = """
  {options.save_dir}/curves.png, samples.txt, metrics.jsonl   the run; step-*: its checkpoints
What next:
  make train ARGS="--steps 3000"                              train on (--restart: from the start)
  make train ARGS="--data my-texts --save-dir runs/mine"      your own text
  examples/minimal.py                                         your own model in your own loop
  docs/site/en/jobs/fine-tune.md                              fine-tune a pretrained model
  docs/site/zh/jobs/                                          the same in Chinese"""


def run(options: Options, on_step: OnStep | None = None) -> int:
    """The whole job: text, model, optimizer, loop; the exit status.

    `on_step` is handed the figures of each step.
    """
    data = prepare_data(options)
    sequences = TrainingSequences(data.train, options.seq_len, options.seed)

    checkpoints = Checkpoints(options.save_dir)
    if options.restart:
        checkpoints.clear()
    made_with = {
        **options.model_arguments(),
        "dtype": options.dtype,
        "moments": options.moments,
        "master_weights": options.master_weights,
        "seed": options.seed,
        "text": data.fingerprint[:16],
    }
    checkpoint = checkpoints.latest()
    if checkpoint is not None:
        check_same_run(checkpoint, made_with, REMEDY)

    model = build_model(options, checkpoint)
    optimizer, scheduler, optim_manager = build_optimizer(model, options)
    position = Position()
    if checkpoint is not None:
        position = go_on(checkpoint, optim_manager, scheduler, options)
    finished_before = position.step >= options.steps
    stop = StopRequest()

    report = Report(
        options.save_dir,
        first_step=position.step,
        num_steps=options.steps,
        log_every=options.log_every,
        curves=options.curves,
    )
    with report.with_listener(on_step):
        greet(report, options, data, model, checkpoint)
        stopping = False
        while position.step < options.steps and not stopping:
            position = train_step(
                model, optimizer, optim_manager, sequences, position, options, report
            )
            stopping = stop.agreed()
            last = position.step == options.steps
            report_if_due(model, data, position, options, report)
            if position.step % options.save_every == 0 or last or stopping:
                checkpoint = checkpoints.save(
                    dataclasses.asdict(position), model, optim_manager, made_with
                ).path
                report.draw()
        checkpoints.close()
        requeue = stopping and position.step < options.steps and stop.is_requeue()
        if stopping and position.step < options.steps:
            report.message(
                f"stopped after step {position.step} and saved {checkpoint}: run the same "
                "command to resume."
            )
        else:
            show_sample(model, data, position, options, report)
            words = "this run had finished before" if finished_before else "finished"
            report.message(f"{words}: {position.step} steps{WHAT_NEXT.format(options=options)}")
    bmt.synchronize()  # the first rank to go has the launcher end the others
    return Exit.REQUEUE if requeue else 0


def report_if_due(
    model: GPT, data: TokenData, position: Position, options: Options, report: Report
) -> None:
    """Validation loss and a sample, where it is time for them; the last sample is for the end."""
    last = position.step == options.steps
    if position.step % options.val_every == 0 or last:
        validate(model, data, position, options, report)
    if position.step % options.sample_every == 0 and not last:
        show_sample(model, data, position, options, report)


def go_on(
    checkpoint: Path,
    optim_manager: bmt.optim.OptimManager,
    scheduler: bmt.lr_scheduler.Cosine,
    options: Options,
) -> Position:
    """Optimizer and schedule as the checkpoint has them; where in the data it is."""
    position = Position(**load_state(checkpoint, optim_manager)[0])
    # The checkpoint says how far the schedule is; how it runs on is said by this command, say with
    # more --steps.
    scheduler.start_lr, scheduler.warmup_iter = options.lr, options.warmup
    scheduler.end_iter = options.steps
    scheduler.step(scheduler.num_iter)
    return position


def train_step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    optim_manager: bmt.optim.OptimManager,
    sequences: TrainingSequences,
    position: Position,
    options: Options,
    report: Report,
) -> Position:
    """One optimizer step on `grad_accumulation` micro-batches per rank; returns the position after
    it. A step that is not finite is skipped.

    Raises:
        NonFiniteError: on all ranks, after `max_bad_steps` of these in a row, naming the cause.
    """
    started = time.perf_counter()
    lr, loss_scale = optimizer.param_groups[0]["lr"], optim_manager.loss_scale
    total = torch.zeros((), device=bmt.device())

    optim_manager.zero_grad()
    for loss in step_losses(model, sequences, position, options):
        optim_manager.backward(loss)
        total += loss.detach().float()
    grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    optim_manager.step()

    mean_loss = bmt.sum_loss(total).item()
    seconds = time.perf_counter() - started
    samples = options.batch_size * options.grad_accumulation * bmt.world_size()
    rate = samples * options.seq_len / seconds
    peak = peak_flops(options.peak_tflops)
    report.step(
        StepReport(
            step=position.step + 1,
            loss=mean_loss,
            grad_norm=float(grad_norm),
            lr=float(lr),
            loss_scale=float(loss_scale),
            tokens_per_second=rate,
            memory=bmt.utils.peak_memory(),
            seconds=seconds,
            mfu=rate * options.flops_per_token() / bmt.world_size() / peak if peak else None,
        )
    )
    if optim_manager.skipped_in_a_row >= options.max_bad_steps:
        losses = step_losses(model, sequences, position, options)
        rows = [
            list(range(first, first + options.batch_size))
            for first in first_sequences(position, options)
        ]
        found = cause_lines(find_cause(model, optim_manager, losses, rows))
        raise non_finite_error(position.step + 1, optim_manager.skipped_in_a_row, found)
    return Position(step=position.step + 1, consumed=position.consumed + samples)


def step_losses(
    model: GPT, sequences: TrainingSequences, position: Position, options: Options
) -> Iterator[torch.Tensor]:
    """The losses of this rank's micro-batches, each computed when it is asked for."""
    loss_function = bmt.loss.FusedCrossEntropy(ignore_index=-100, parallel=True)
    for first in first_sequences(position, options):
        inputs, targets = sequences.batch(first, options.batch_size)
        yield batch_loss(model, loss_function, inputs, targets) / options.grad_accumulation


def first_sequences(position: Position, options: Options) -> list[int]:
    """The first sequence of each of this rank's micro-batches."""
    return [
        rank_position(position.consumed, micro, options.batch_size, bmt.rank(), bmt.world_size())
        for micro in range(options.grad_accumulation)
    ]


def build_model(options: Options, checkpoint: Path | None) -> GPT:
    """The sharded model, freshly initialised or as the checkpoint has it."""
    model = GPT(
        **options.model_arguments(),
        bias=True,
        dtype=DTYPES[options.dtype],
        use_checkpoint=options.recompute,
        zero_level=options.zero_level,
    )
    if checkpoint is not None:
        bmt.load(model, model_path(checkpoint))
    else:
        bmt.init_parameters(model)
    return model


def build_optimizer(
    model: GPT, options: Options
) -> tuple[torch.optim.Optimizer, bmt.lr_scheduler.Cosine, bmt.optim.OptimManager]:
    """AdamW with a warm-up and a cosine, in the manager that scales losses and steps both."""
    parameters = list(model.parameters())
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    kind: Any = bmt.optim.AdamOffloadOptimizer if options.offload else bmt.optim.AdamOptimizer
    optimizer: torch.optim.Optimizer = kind(
        groups,
        lr=options.lr,
        betas=(0.9, 0.95),
        moments=options.moments,
        master_weights=options.master_weights,
    )
    scheduler = bmt.lr_scheduler.Cosine(
        optimizer,
        start_lr=options.lr,
        warmup_iter=options.warmup,
        end_iter=options.steps,
        num_iter=0,
    )
    # Only fp16 has so few exponent bits that small gradients vanish unless the loss is scaled.
    # `train_step` ends a run whose steps are skipped, and says why.
    optim_manager = bmt.optim.OptimManager(
        loss_scale=1024 if options.dtype == "fp16" else None, max_skipped_steps=None
    )
    optim_manager.add_optimizer(optimizer, scheduler)
    return optimizer, scheduler, optim_manager


def greet(
    report: Report, options: Options, data: TokenData, model: GPT, checkpoint: Path | None
) -> None:
    """Say what is about to be trained, on what, and from where."""
    report.message(
        f"GPT-2 ({options.preset}): {options.layers} layers, {options.dim} wide, {options.dtype}, "
        f"ZeRO-{options.zero_level} over {bmt.world_size()} process(es) on {bmt.device().type}"
        + (f", {options.tp} of them share each layer" if options.tp > 1 else "")
        + (
            f", {options.pp} stages, {options.micro_batches} micro-batches"
            if options.pp > 1
            else ""
        )
    )
    report.message(f"text: {len(data.train):,} training tokens, {len(data.valid):,} held out")
    report.message(
        f"resuming from {checkpoint}"
        if checkpoint is not None
        else f"starting from scratch; checkpoints go to {options.save_dir}; stop with Ctrl-C, "
        "resume with the same command"
    )


def choose_repeatable_kernels() -> None:
    """On GPUs, sum in the same order each time; the faster backward of attention, above all, does
    not.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Attention looks at this mode only if it is strict; with warnings only it stays as it is.
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=False)
    torch_deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid, costs time


def start(options: Options) -> None:
    """Join the run."""
    bmt.init_distributed(
        seed=options.seed,
        zero_level=options.zero_level,
        tp_size=options.tp,
        pipe_size=options.pp if options.pp > 1 else -1,
        num_micro_batches=options.micro_batches,
        compile=options.compile,
        fp8=options.fp8,
    )


def main(arguments: Sequence[str] | None = None, on_step: OnStep | None = None) -> int:
    """Exit status: 0 for a run that finished or was asked to stop, 75 for one that SIGUSR1 stopped,
    2 for arguments or text that cannot be used.

    Without arguments they are those of the command line. `on_step` is handed the figures of each
    step, on every rank, for programs that call this one.
    """
    options = parse_options(sys.argv[1:] if arguments is None else arguments, bmt.device().type)
    if options.deterministic:
        choose_repeatable_kernels()
    try:
        start(options)
    except ConfigurationError as error:  # every rank says so: none knows its number yet
        print(f"error: --tp {options.tp} --pp {options.pp}: {error}", file=sys.stderr, flush=True)
        return 2
    try:
        return run(options, on_step)
    except (DataError, ResumeError) as error:
        bmt.print_rank(f"error: {error}", file=sys.stderr, flush=True)
        # or the launcher, seeing another rank end, would end rank 0 before it has spoken
        bmt.synchronize()
        return 2


if __name__ == "__main__":
    sys.exit(main())
