"""generate and stream: from a model and the ids of prompts to the ids that follow."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

import bmtrain as bmt
from model_center.errors import ConfigError
from model_center.generation.beams import BeamSearch
from model_center.generation.config import GenerationConfig
from model_center.generation.decode_runner import DecodeRunner
from model_center.generation.lookahead import StopCheck, StopChecks
from model_center.generation.prepare import PromptBatch, prepared
from model_center.generation.ranks import GenerationRanks
from model_center.generation.search import (
    DecodeTask,
    GenerationOutput,
    Search,
    SingleSearch,
    StreamedSearch,
)
from model_center.generation.session import Session
from model_center.generation.weights import Weights, weights_of, without_plans
from model_center.model.base import BaseModel

Kind = TypeVar("Kind", bound=Search)
# Steps that a GPU has to do while the host looks whether one before them was the last.
AHEAD = 2
# Of what whole weights leave of the memory, how much the cache must leave to activations: it is
# there twice while rows are copied for beams.
SPARE = 3


def generate(
    model: BaseModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    config: GenerationConfig | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    tokenizer: Any = None,
    generator: torch.Generator | None = None,
    session: Session | None = None,
    **options: Any,
) -> GenerationOutput:
    """Continue prompts. Collective if the model is sharded, with or without prompts of a rank.

    Args:
        model: any decoder-only or encoder-decoder model. Dropout is off while it generates.
        input_ids: integers (batch, length), on any device; of decoder-only models padded on the
            left. (0, any length) for none.
        attention_mask: of the same shape, nonzero where a token is valid. If None and
            `pad_token_id` is given and ends no sequence, tokens equal to it are padding; otherwise
            all are valid.
        config: how sequences are continued; None for the default.
        inputs: what else the model takes, by name: `decoder_input_ids` of encoder-decoders, in
            place of the one start token; `context`, `span` of CPM-1; `token_type_ids` too of CPM-3.
        tokenizer: needed for `stop_strings`.
        generator: of random numbers, in place of `seed`.
        session: keeps memory and recorded steps for the next generation; None for nothing.
        options: values that replace the configuration's.

    Returns:
        The prompts and what follows them, on the device of the model.

    Raises:
        ConfigError, InputError: before anything is computed; on every rank if on one.
    """
    prompts = PromptBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        inputs=inputs or {},
        tokenizer=tokenizer,
        generator=generator,
    )
    return GenerationRun(
        model, lambda: (prompts, GenerationConfig.of(config, **options)), search_of, session
    ).completed()


def stream(
    model: BaseModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    config: GenerationConfig | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    tokenizer: Any = None,
    generator: torch.Generator | None = None,
    session: Session | None = None,
    **options: Any,
) -> Iterator[list[int | None]]:
    """As `generate`, token by token: a token for each row, None for rows that have ended.

    The arguments are those of `generate`. They are checked at once, and tokens are computed when
    they are asked for. Where the model is sharded, every rank must ask until there are no more, or
    close the iterator after its first token (leaving a `for` loop does): it then takes part in the
    others' steps.

    Raises:
        ConfigError: for beam search, whose tokens are known only at its end; and as in `generate`.
    """
    prompts = PromptBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        inputs=inputs or {},
        tokenizer=tokenizer,
        generator=generator,
    )
    run = GenerationRun(
        model,
        lambda: (prompts, GenerationConfig.of(config, **options)),
        streamed_search_of,
        session,
    )
    return (search.new_tokens() for search in run.steps())


def search_of(task: DecodeTask) -> Search:
    """The search that a task asks for."""
    return BeamSearch(task) if task.config.num_beams > 1 else SingleSearch(task)


def streamed_search_of(task: DecodeTask) -> StreamedSearch:
    """The search that a task asks for, if its tokens are known step by step.

    Raises:
        ConfigError: if not.
    """
    if task.config.num_beams > 1:
        raise ConfigError(
            f"num_beams is {task.config.num_beams}: beams are not streamed, as the "
            "best one is known at the end only."
        )
    return StreamedSearch(task)


class GenerationRun(Generic[Kind]):
    """One generation: its arguments, checked by all ranks; then its steps, once; then its output.

    A rank whose weights are whole goes its own way: steps of one kind of work, which on a GPU is
    recorded as a CUDA graph, and issued before it is known that they are needed. So it is with a
    model that is not sharded or alone on its rank, and where all ranks have room to gather all of
    the weights for the time of the generation; but not in a stream over several ranks, in the
    midst of which the program may train. Else ranks go step by step together, and gather the
    layers in each.

    Attributes:
        task: what is continued, and how.
        num_prompts: how many prompts there are; for none, the task has one that is made up.

    Args:
        model: as in `generate`.
        ask: says what to continue and how; its errors, too, are those of all ranks.
        make: makes the search.
        session: as in `generate`.
    """

    def __init__(
        self,
        model: BaseModel,
        ask: Callable[[], tuple[PromptBatch, GenerationConfig]],
        make: Callable[[DecodeTask], Kind],
        session: Session | None = None,
    ) -> None:
        self._model, self._ranks, self._session = model, GenerationRanks(model), session
        error: Exception | None = None
        try:
            if session is not None:
                session.check()
            prompts, config = ask()
            self._decoding, self.task = prepared(model, prompts, config)
            self._search = make(self.task)
            self.num_prompts = len(prompts.input_ids)
        # whatever it is, the other ranks must hear of it before they wait for this one
        except Exception as failure:
            error = failure
        self._ranks.agree(error)
        self._is_streamed = isinstance(self._search, StreamedSearch)
        self._weights = self._whole_weights()

    @torch.no_grad()
    def steps(self) -> Iterator[Kind]:
        """Choose tokens, one for every row in each step."""
        weights = self._weights
        with contextlib.ExitStack() as stack:
            stack.enter_context(evaluating(self._model))
            if weights is None:
                stack.callback(self._decoding.end)
                yield from self._decode_in_lockstep()
                return
            if self._ranks.are_several:
                stack.enter_context(bmt.unwatched())
                if self._session is not None:
                    stack.enter_context(self._session.freed_by_errors())
            stack.enter_context(weights.held())
            if self.num_prompts > 0:
                runner = DecodeRunner(self._model, self._decoding, weights, self._session)
                stack.enter_context(runner.open())
                yield from self._decode_alone(runner)

    def completed(self) -> GenerationOutput:
        """All steps, and what comes of them."""
        for _ in self.steps():
            pass
        return self._search.output().first(self.num_prompts * self.task.config.num_return_sequences)

    def _whole_weights(self) -> Weights | None:
        """The weights, if ranks go their own ways: all ranks do, or none. Collective."""
        weights = weights_of(self._model, is_sharded=self._ranks.is_sharded)
        if not self._ranks.are_several:
            return weights
        fits = weights is not None and self._fits(weights)
        are_whole = self._ranks.all_can(fits and not self._is_streamed)
        # A stream needs no whole weights, but may need the room of those that are kept.
        if self._session is not None and not (are_whole or (fits and self._is_streamed)):
            self._session.free()
        return weights if are_whole else None

    def _fits(self, weights: Weights) -> bool:
        """Whether this rank has room for whole weights, and for the cache, beside what the session
        keeps for this generation; what it keeps for another one is freed.
        """
        if self._session is not None:
            self._session.hold(weights.memory())
        cache = self._decoding.num_bytes(self.task.num_new, self._search.copies)
        return weights.fits(self._num_caches() * cache)

    def _num_caches(self) -> int:
        """How much room there must be beside the weights, in sizes of the cache."""
        if self.num_prompts == 0:
            return 0
        num_rows, length = self.task.prefix.shape
        is_there = self._session is not None and self._session.has_room(
            num_rows * self._search.copies, length + self.task.num_new
        )
        return SPARE - is_there

    def _decode_alone(self, runner: DecodeRunner) -> Iterator[Kind]:
        """All steps, by passes that need no other rank."""
        search, task = self._search, self.task
        scores = runner.first(task.num_new, search.copies)
        checks, pending = StopChecks(search, task), deque[StopCheck]()
        # Nothing is issued ahead where somebody else acts between steps: a program may write the
        # weights between the tokens of a stream, and hooks would see steps that nobody needs.
        is_alone = not (self._is_streamed or runner.is_watched)
        ahead = steps_ahead(task.prefix.device) if is_alone else 0
        for number in range(1, task.num_new + 1):
            search.advance(scores)
            pending.append(checks.ask())
            if ahead:
                if len(pending) > ahead and checks.was_last(pending.popleft()):
                    return
                if number < task.num_new:
                    scores = runner.next(search.tokens, search.parents)
            yield search
            if self._is_streamed:
                runner.renew()
            if not ahead:
                if checks.was_last(pending.popleft()):
                    return
                scores = runner.next(search.tokens, search.parents)
        any(map(checks.was_last, pending))

    def _decode_in_lockstep(self) -> Iterator[Kind]:
        """All steps, in each of which all ranks take part until no rank needs one."""
        decoding, search, ranks = self._decoding, self._search, self._ranks
        with without_plans(self.task.prefix.device):
            logits = decoding.start(self.task.num_new).repeat_interleave(search.copies, 0)
        decoding.expand(search.copies)
        continues, anyone = self.num_prompts > 0, self.num_prompts == 0 and self._others_continue()
        while continues:
            search.advance(logits)
            try:
                yield search
            except GeneratorExit:  # nobody here wants the rest
                self._gather_for_others(self._others_continue())
                raise
            continues, anyone = ranks.which_continue(search.continues())
            if continues:
                with without_plans(self.task.prefix.device):
                    logits = decoding.step(search.tokens, search.parents)
        self._gather_for_others(anyone)

    def _gather_for_others(self, others_continue: bool) -> None:
        """Take part in the forward passes of the other ranks until all are done."""
        while others_continue:
            with without_plans(self.task.prefix.device):
                self._decoding.idle()
            others_continue = self._others_continue()

    def _others_continue(self) -> bool:
        """What this rank asks after each pass when it is done itself."""
        return self._ranks.which_continue(torch.tensor(False, device=self._decoding.prefix.device))[
            1
        ]


def steps_ahead(device: torch.device) -> int:
    """How many steps are issued before it is known that they are needed."""
    return 0 if device.type == "cpu" else AHEAD


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off, and on again afterwards in those modules where it was."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
