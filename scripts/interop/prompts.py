"""OpenPrompt's templates and verbalizers in sharded models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from openprompt import PromptDataLoader, PromptForClassification, PromptForGeneration
from openprompt.data_utils import InputExample
from openprompt.plms import get_model_class
from openprompt.prompts import (
    AutomaticVerbalizer,
    GenerationVerbalizer,
    KnowledgeableVerbalizer,
    ManualTemplate,
    ManualVerbalizer,
    MixedTemplate,
    One2oneVerbalizer,
    PrefixTuningTemplate,
    ProtoVerbalizer,
    PTRTemplate,
    PTRVerbalizer,
    PtuningTemplate,
    SoftTemplate,
    SoftVerbalizer,
)
from openprompt.utils.calibrate import calibrate
from scripts.interop import backbones
from scripts.interop.comparing import Batch, Case, Program, Side

ROWS, STEPS = 4, 3
CLASSES = ["bad", "good"]
WORDS = [["bad", "poor"], ["good", "fine", "great"]]
TEXT = '{"placeholder": "text_a"} {"placeholder": "text_b"} it is {"mask"} .'
MIXED = (
    '{"placeholder": "text_a"} {"soft": "it"} {"soft": None, "soft_id": 1} {"soft": None, '
    '"duplicate": 3} {"soft_id": 1} {"mask"} .'
)
PTUNING = '{"placeholder": "text_a"} {"soft"} {"soft"} it is {"mask"}'
# OpenPrompt leaves soft tokens without a word out before GPT-2.
OF_WORDS = '{"placeholder": "text_a"} {"soft": "it was"} in {"soft": "all"} {"mask"}'
PTR = '{"placeholder": "text_a"} the {"mask"} {"soft"} {"mask"} is {"mask"}'
SENTENCES = [
    "the film was great fun",
    "a poor and slow story",
    "we liked the actors",
    "nobody knows what it is about",
    "good music",
    "two hours of my life are gone",
    "it was fine for a rainy day",
    "the end is bad",
    "not a good book but a good film",
    "sleep well",
    "what a day",
    "never again",
]

Make = Callable[[Any, Any], Any]

TEMPLATES: dict[str, Make] = {
    "manual": lambda plm, tok: ManualTemplate(tokenizer=tok, text=TEXT),
    "soft": lambda plm, tok: SoftTemplate(plm, tok, text=TEXT, num_tokens=3),
    "soft_random": lambda plm, tok: SoftTemplate(
        plm, tok, text=TEXT, num_tokens=3, initialize_from_vocab=False
    ),
    "mixed": lambda plm, tok: MixedTemplate(plm, tok, text=_soft(plm, MIXED)),
    "ptuning_lstm": lambda plm, tok: PtuningTemplate(plm, tok, text=_soft(plm, PTUNING)),
    "ptuning_mlp": lambda plm, tok: PtuningTemplate(
        plm, tok, text=_soft(plm, PTUNING), prompt_encoder_type="mlp"
    ),
    "ptr": lambda plm, tok: PTRTemplate(plm, tok, text=PTR),
    "prefix": lambda plm, tok: PrefixTuningTemplate(plm, tok, text=TEXT, num_token=3, mid_dim=8),
    "prefix_encoder": lambda plm, tok: PrefixTuningTemplate(
        plm, tok, text=TEXT, num_token=3, mid_dim=8, using_decoder_past_key_values=False
    ),
    "prefix_decoder": lambda plm, tok: PrefixTuningTemplate(
        plm, tok, text=TEXT, num_token=3, mid_dim=8, using_encoder_past_key_values=False
    ),
}
VERBALIZERS: dict[str, Make] = {
    "manual": lambda plm, tok: ManualVerbalizer(tok, classes=CLASSES, label_words=WORDS),
    "manual_logits": lambda plm, tok: ManualVerbalizer(
        tok, classes=CLASSES, label_words=WORDS, post_log_softmax=False, multi_token_handler="mean"
    ),
    "calibrated": lambda plm, tok: ManualVerbalizer(tok, classes=CLASSES, label_words=WORDS),
    "one2one": lambda plm, tok: One2oneVerbalizer(tok, classes=CLASSES, label_words=CLASSES),
    "soft": lambda plm, tok: SoftVerbalizer(tok, plm, classes=CLASSES, label_words=CLASSES),
    "soft_plain": lambda plm, tok: SoftVerbalizer(tok, plm, classes=CLASSES),
    "knowledgeable": lambda plm, tok: _knowledgeable(tok),
    "knowledgeable_calibrated": lambda plm, tok: _knowledgeable(tok),
    "proto": lambda plm, tok: _proto(plm, tok, None),
    "proto_alone": lambda plm, tok: _proto(plm, tok, "proto"),
    "proto_ensemble": lambda plm, tok: _proto(plm, tok, "multi"),
    "automatic": lambda plm, tok: AutomaticVerbalizer(
        tok, num_candidates=20, classes=CLASSES, num_searches=1
    ),
    "automatic_gathered": lambda plm, tok: AutomaticVerbalizer(
        tok, num_candidates=20, classes=CLASSES, num_searches=1
    ),
    "automatic_words": lambda plm, tok: AutomaticVerbalizer(
        tok, num_candidates=0, label_word_num_per_class=3, classes=CLASSES, score_fct="ce"
    ),
    "automatic_unset": lambda plm, tok: AutomaticVerbalizer(tok, classes=CLASSES),
    "ptr": lambda plm, tok: PTRVerbalizer(
        tok, classes=CLASSES, label_words=[["film", "was", "bad"], ["film", "is", "good"]]
    ),
}


def _soft(plm: Any, text: str) -> str:
    return OF_WORDS if plm.config.model_type == "gpt2" else text


def _knowledgeable(tok: Any) -> Any:
    made = KnowledgeableVerbalizer(tok, classes=CLASSES, candidate_frac=0.01)
    made.label_words = [list(words) for words in WORDS]
    return made


def _proto(plm: Any, tok: Any, trained: str | None) -> Any:
    plm.config.hidden_size = 16
    made = ProtoVerbalizer(
        tok, plm, classes=CLASSES, label_words=WORDS, mid_dim=6, multi_verb=trained or "multi"
    )
    made.trained = trained is not None  # `train_proto` itself wants a GPU
    return made


@dataclasses.dataclass(frozen=True)
class Kind:
    """A combination."""

    plm: str
    template: str = "manual"
    verbalizer: str = "manual"
    frozen: str = ""


@functools.cache
def tokenizer(name: str) -> Any:
    return backbones.tokenizer(name)


def examples() -> list[InputExample]:
    return [
        InputExample(
            guid=str(number),
            text_a=sentence,
            text_b="they say",
            label=number * 5 % 3 % 2,
            tgt_text="so it was good",
        )
        for number, sentence in enumerate(SENTENCES)
    ]


def batches(kind: Kind, template: Any, tok: Any, verbalizer: Any = None) -> list[Batch]:
    """Rows as OpenPrompt's loader makes them."""
    loader = PromptDataLoader(
        dataset=examples(),
        template=template,
        tokenizer=tok,
        tokenizer_wrapper_class=get_model_class(kind.plm).wrapper,
        max_seq_length=40,
        decoder_max_length=8,
        batch_size=ROWS,
        teacher_forcing=verbalizer is not None,
        predict_eos_token=verbalizer is not None,
        truncate_method="head",
        verbalizer=verbalizer if isinstance(verbalizer, GenerationVerbalizer) else None,
    )
    return [
        {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        for batch in loader
    ]


def arguments(kind: Kind) -> dict[str, bool]:
    return {"freeze_plm": kind.frozen == "frozen", "plm_eval_mode": kind.frozen == "eval"}


def classification(kind: Kind, side: Side) -> Program:
    """A whole PromptForClassification, wrapped."""
    tok = tokenizer(kind.plm)
    plm = backbones.model(kind.plm, max(tok.get_vocab().values()) + 1, tok.pad_token_id)
    template = TEMPLATES[kind.template](plm, tok)
    verbalizer = VERBALIZERS[kind.verbalizer](plm, tok)
    data = batches(kind, template, tok)
    model = side.wrap(PromptForClassification(plm, template, verbalizer, **arguments(kind)).train())
    if kind.verbalizer.startswith("automatic") and kind.verbalizer != "automatic_unset":
        for batch in data:
            # All rows on every rank, or those of the other ranks gathered before words are chosen.
            model(side.own(batch) if kind.verbalizer == "automatic_gathered" else batch)
        if kind.verbalizer == "automatic_gathered":
            for name in ("probs_buffer", "labels_buffer"):
                setattr(verbalizer, name, side.whole(getattr(verbalizer, name)))
        verbalizer.optimize_to_initialize()

    def loss(batch: Batch) -> torch.Tensor:
        labels = batch["label"]
        if kind.verbalizer == "automatic_unset":
            torch.manual_seed(1)
            return model(batch)[:, 0].sum() * 0 + F.cross_entropy(
                model.forward_without_verbalize(batch)[:, :2], labels
            )
        return F.cross_entropy(model(batch), labels)

    def calibrated(batch: Batch) -> torch.Tensor:
        logits = calibrate(model, [_Movable(data[0])])  # the same rows on all ranks
        verbalizer.register_calibrate_logits(logits)
        return model(batch)

    if kind.verbalizer == "automatic_unset":  # it draws its logits
        return Program(model, loss, data)
    return Program(model, loss, data, calibrated if "calibrated" in kind.verbalizer else model)


class _Movable(dict[str, Any]):
    """A batch that `calibrate` can move to a device."""

    def to(self, device: Any) -> _Movable:
        return _Movable(self)


class Generating(PromptForGeneration):  # type: ignore[misc]  # untyped
    """With what transformers asks of a model that generates since OpenPrompt was written."""

    generation_config = property(lambda self: self.plm.generation_config)

    def can_generate(self) -> bool:
        return True

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        return None

    def _prepare_encoder_decoder_kwargs_for_generation(
        self, inputs: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> dict[str, Any]:
        """The encoder is not told about caches."""
        use_cache = model_kwargs.pop("use_cache", None)
        out: dict[str, Any] = super()._prepare_encoder_decoder_kwargs_for_generation(
            inputs, model_kwargs, *args
        )
        return {**out, "use_cache": use_cache}

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], **settings: Any
    ) -> dict[str, Any]:
        if self.generate_ith_token == 0:
            known = {k: v for k, v in self.last_model_inputs.items() if k in model_kwargs}
            model_kwargs.update(known)
        self.generate_ith_token += 1
        return hf.GenerationMixin._update_model_kwargs_for_generation(
            self, outputs, model_kwargs, **settings
        )


def generation(kind: Kind, side: Side, **settings: Any) -> Program:
    """A whole PromptForGeneration, wrapped, trained, and asked to generate."""
    tok = tokenizer(kind.plm)
    plm = backbones.model(kind.plm, max(tok.get_vocab().values()) + 1, tok.pad_token_id)
    template = TEMPLATES[kind.template](plm, tok)
    verbalizer: Any = True
    if kind.verbalizer == "generation":
        verbalizer = GenerationVerbalizer(tok, classes=CLASSES, label_words=CLASSES)
    data = batches(kind, template, tok, verbalizer)
    model = side.wrap(Generating(plm, template, tokenizer=tok, **arguments(kind)).train())

    def answer(batch: Batch) -> torch.Tensor:
        sequences, _ = model.generate(batch, **settings)
        length = 60
        return torch.tensor([(row + [-1] * length)[:length] for row in sequences])

    return Program(model, model, data, answer=answer if settings else None)


def case(build: Callable[..., Program], kind: Kind, note: str = "", **settings: Any) -> Case:
    words = ["openprompt", build.__name__, *filter(None, dataclasses.astuple(kind)), note]
    return Case(" ".join(words).strip(), functools.partial(build, kind, **settings))


MASKED = ("bert", "roberta", "gpt2", "t5")
GENERATE = {"max_new_tokens": 5, "do_sample": False}


class EndsWhereDivisible(hf.LogitsProcessor):
    """Ends a sequence when its length is a multiple of 7: after few words in one row, after many in
    another.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 7 == 6:
            scores[:, tokenizer("gpt2").eos_token_id] = 1e9
        return scores


ENDING = {
    "max_new_tokens": 9,
    "do_sample": False,
    "logits_processor": hf.LogitsProcessorList([EndsWhereDivisible()]),
}

CASES = [
    *(
        case(classification, Kind(plm, template))
        for plm in MASKED
        for template in TEMPLATES
        if template != "ptr"
    ),
    *(case(classification, Kind(plm, "ptr", "ptr")) for plm in MASKED),
    *(
        case(classification, Kind(plm, "manual", verbalizer))
        for plm in MASKED
        for verbalizer in VERBALIZERS
        if verbalizer not in ("manual", "ptr")
    ),
    *(
        case(classification, Kind(plm, template, verbalizer, frozen))
        for plm in MASKED
        for template, verbalizer in (("soft", "manual"), ("mixed", "soft"))
        for frozen in ("frozen", "eval")
    ),
    *(
        case(generation, Kind(plm, template, "given", frozen), "greedy", **GENERATE)
        for plm in ("gpt2", "t5")
        for template in TEMPLATES
        if template != "ptr"
        for frozen in ("", "frozen")
    ),
    *(
        case(generation, Kind("gpt2", template, "given"), "ending", **ENDING)
        for template in ("manual", "mixed", "prefix")
    ),
    *(
        case(generation, Kind(plm, template, "generation"), "beams", **GENERATE, num_beams=2)
        for plm in ("gpt2", "t5")
        for template in ("manual", "soft", "prefix")
    ),
    *(
        case(generation, Kind(plm, template, "given"), "trained")
        for plm in ("gpt2", "t5")
        for template in TEMPLATES
        if template != "ptr"
    ),
]
