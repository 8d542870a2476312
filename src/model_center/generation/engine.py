"""generate and stream: from a model and the ids of prompts to the ids that follow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from model_center.errors import ConfigError
from model_center.generation.beams import BeamSearch
from model_center.generation.config import GenerationConfig
from model_center.generation.output import GenerationOutput
from model_center.generation.peers import Peers
from model_center.generation.prepare import Prompts, prepared
from model_center.generation.search import Search, SingleSearch, Task
from model_center.model.base import BaseModel

Kind = TypeVar("Kind", bound=Search)


def generate(
    model: BaseModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    config: GenerationConfig | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    tokenizer: Any = None,
    generator: torch.Generator | None = None,
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
        config: how, or the default; `options` replace its values.
        inputs: what else the model takes, by name: `decoder_input_ids` of encoder-decoders, in
            place of the one start token; `context`, `span` of CPM-1; `token_type_ids` too of CPM-3.
        tokenizer: needed for `stop_strings`.
        generator: of random numbers, in place of `seed`.

    Raises:
        ConfigError, InputError: before anything is computed; on every rank if on one.
    """
    prompts = Prompts(
        input_ids=input_ids,
        attention_mask=attention_mask,
        inputs=inputs or {},
        tokenizer=tokenizer,
        generator=generator,
    )
    return Run(
        model, lambda: (prompts, GenerationConfig.of(config, **options)), search_of
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
    **options: Any,
) -> Iterator[list[int | None]]:
    """As `generate`, token by token: a token for each row, None for rows that have ended.

    Arguments are checked at once, tokens computed when they are asked for. Where the model is
    sharded every rank must ask until there is no more, or close the iterator after its first token
    (leaving a `for` loop does): it then accompanies the others.

    Raises:
        ConfigError: for beam search, whose tokens are known only at its end; and as in `generate`.
    """
    prompts = Prompts(
        input_ids=input_ids,
        attention_mask=attention_mask,
        inputs=inputs or {},
        tokenizer=tokenizer,
        generator=generator,
    )
    run = Run(model, lambda: (prompts, GenerationConfig.of(config, **options)), streamed_search_of)
    return (search.new_tokens() for search in run.steps())


def search_of(task: Task) -> Search:
    """The search that a task asks for."""
    return BeamSearch(task) if task.config.num_beams > 1 else SingleSearch(task)


def streamed_search_of(task: Task) -> SingleSearch:
    """The search that a task asks for, if its tokens are known step by step.

    Raises:
        ConfigError: if not.
    """
    if task.config.num_beams > 1:
        raise ConfigError(
            f"num_beams is {task.config.num_beams}: beams are not streamed, as the "
            "best one is known at the end only."
        )
    return SingleSearch(task)


class Run(Generic[Kind]):
    """One generation: its arguments, checked by all ranks; then its steps, once; then its output.

    Attributes:
        task: what is continued, and how.
        num_prompts: how many prompts there are; for none, the task has one that is made up.

    Args:
        model: as in `generate`.
        ask: says what to continue and how; its errors, too, are those of all ranks.
        make: makes the search.
    """

    def __init__(
        self,
        model: BaseModel,
        ask: Callable[[], tuple[Prompts, GenerationConfig]],
        make: Callable[[Task], Kind],
    ) -> None:
        self._model, self._peers = model, Peers(model)
        error: Exception | None = None
        try:
            prompts, config = ask()
            self._decoding, self.task = prepared(model, prompts, config)
            self._search = make(self.task)
            self.num_prompts = len(prompts.input_ids)
        # whatever it is, the other ranks must hear of it before they wait for this one
        except Exception as failure:
            error = failure
        self._peers.agree(error)

    @torch.no_grad()
    def steps(self) -> Iterator[Kind]:
        """Choose tokens, one for every row in each step."""
        decoding, search, peers = self._decoding, self._search, self._peers
        with evaluating(self._model):
            logits = decoding.start(self.task.num_new).repeat_interleave(search.copies, 0)
            decoding.expand(search.copies)
            goes_on, anyone = self.num_prompts > 0, self.num_prompts == 0 and self._others_go_on()
            while goes_on:
                search.advance(logits)
                try:
                    yield search
                except GeneratorExit:  # nobody here wants the rest
                    self._accompany(self._others_go_on())
                    raise
                goes_on, anyone = peers.who_goes_on(search.goes_on())
                if goes_on:
                    logits = decoding.step(search.tokens, search.parents)
            self._accompany(anyone)

    def completed(self) -> GenerationOutput:
        """All steps, and what comes of them."""
        for _ in self.steps():
            pass
        return self._search.output().first(self.num_prompts * self.task.config.num_return_sequences)

    def _accompany(self, others_go_on: bool) -> None:
        """Take part in the forward passes of the other ranks until all are done."""
        while others_go_on:
            self._decoding.idle()
            others_go_on = self._others_go_on()

    def _others_go_on(self) -> bool:
        """What this rank asks after each pass when it is done itself."""
        return self._peers.who_goes_on(torch.tensor(False, device=self._decoding.prefix.device))[1]


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off, and on again afterwards in those modules where it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
