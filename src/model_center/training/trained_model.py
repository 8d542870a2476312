"""What `python -m model_center train` trains: a decoder of this package, or one of transformers.

Both are asked the same: the loss of packed rows, adapters, 4 bits, an answer, files.
"""

from __future__ import annotations

import abc
import argparse
import inspect
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.shard.parameter import computed_with
from model_center.config.base import CONFIG_FILE, SPECIAL_IDS, read_json
from model_center.errors import ConfigError, WeightsError
from model_center.generation import generate
from model_center.hub.resolving import resolve
from model_center.layer.mask import AttentionMask
from model_center.model.causal import CausalModel, TokenModel
from model_center.model.gptj import GPTj
from model_center.model.llama import Llama
from model_center.model.registry import CLASSES
from model_center.optional import package
from model_center.tokenizer import (
    GLMTokenizer,
    GPT2Tokenizer,
    GPTjTokenizer,
    LlamaTokenizer,
    MistralTokenizer,
    OPTTokenizer,
    Qwen2Tokenizer,
)
from model_center.training.adapters import ALL, ATTENTION, Lora, adapter_staging
from model_center.training.flops import flops_per_token
from model_center.training.quantization import quantize
from model_center.training.setup import DTYPES, pretrained, save_model, untrained
from model_center.weights.conversions import load_transformers
from model_center.weights.staging import Staging, writing
from model_center.weights.tokenizers import save_tokenizer

Batch = Mapping[str, torch.Tensor]
# By the model's class, or one that it is built on, whose tokens each reads.
TOKENIZERS: dict[str, Any] = {
    "GLM": GLMTokenizer,
    "GPT2": GPT2Tokenizer,
    "GPTj": GPTjTokenizer,
    "Llama": LlamaTokenizer,
    "Mistral": MistralTokenizer,
    "OPT": OPTTokenizer,
    "Qwen2": Qwen2Tokenizer,
    "Qwen3": Qwen2Tokenizer,
}
# What transformers' models call the projections of attention.
TRANSFORMERS_ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "dense"),
    *("query_key_value", "c_attn", "Wqkv", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("kv_b_proj", "query", "key", "value"),
)
# What configurations call the factor of the scores, and what they are divided by.
FACTORS, DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
LARGE = 2**30  # bytes of scores that are worth a head that does not hold them
# A line of a module that computes with a layer's weight and does not call the layer.
WEIGHT_READ = re.compile(
    r"^(?!.*init).*self\.(\w+)\.weight\b(?!\s*=|\[|\.(?:_|dtype|device|shape|data))", re.MULTILINE
)


class Head(NamedTuple):
    """Scores of hidden states: a linear map, times a factor, within a bound.

    Attributes:
        factor: of the scores.
        bound: b of b tanh(score / b); None for none.
    """

    factor: float
    bound: float | None

    def scores(self, product: torch.Tensor) -> torch.Tensor:
        """Of the linear map's output."""
        scores = product if self.factor == 1.0 else product * self.factor
        return scores if self.bound is None else torch.tanh(scores / self.bound) * self.bound

    def losses(
        self, hidden: torch.Tensor, layer: Any, targets: torch.Tensor, reduction: str
    ) -> torch.Tensor:
        """Cross-entropies (rows,), or their sum, without the scores of all rows in memory.

        Args:
            hidden: (rows, width).
            layer: the linear map.
            targets: int64 (rows,).
            reduction: "none" or "sum".
        """
        if self.bound is None:
            loss = bmt.loss.FusedLinearCrossEntropy(reduction=reduction)
            if self.factor != 1.0:
                hidden = hidden * self.factor
            bias = layer.bias if layer.bias is None else layer.bias * self.factor
            return loss(hidden, layer.weight, targets, bias)
        # once for all chunks, whose number differs between ranks
        weight = computed_with(layer.weight)
        bias = None if layer.bias is None else computed_with(layer.bias)

        def part(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            scores = self.scores(F.linear(hidden, weight, bias))
            found: torch.Tensor = bmt.loss.FusedCrossEntropy(reduction="none")(scores, targets)
            return found

        size = max(LARGE // (weight.shape[0] * weight.element_size()), 1)
        pairs = zip(hidden.split(size), targets.split(size), strict=True)
        found = torch.cat([checkpoint(part, *pair, use_reentrant=False) for pair in pairs])
        return found if reduction == "none" else found.sum()


def head_of(config: Any) -> Head:
    """What the configuration of a model of transformers says of its scores."""
    values, factor = vars(config), 1.0
    for name in FACTORS:
        factor *= values.get(name) or 1.0
    for name in DIVISORS:
        factor /= values.get(name) or 1.0
    return Head(factor, values.get("final_logit_softcapping") or None)


class Vocabulary(NamedTuple):
    """What a model from random weights reads and writes, in place of its own.

    Attributes:
        tokenizer: a fast one of transformers.
        vocab_size: ids that the model knows; None for as many as its configuration says.
    """

    tokenizer: Any
    vocab_size: int | None = None

    def special_ids(self) -> dict[str, int | None]:
        """What a configuration says of the tokenizer, by Hugging Face's names."""
        return {
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
        }


class TrainedModel(abc.ABC):
    """A model and its tokenizer.

    Attributes:
        model: what is trained.
        trunk: the part of it whose `last_hidden_state` its head reads.
        tokenizer: whose chat template conversations are written by.
        vocab_size: ids that the model knows.
        num_positions: of the longest sequence that it can compute; None for any.
        rope_limits: tokens beyond which a sample changes rotary frequencies for all that share its
            micro-batch.
        is_packed: whether several samples may share a row without seeing one another.
    """

    model: torch.nn.Module
    trunk: torch.nn.Module
    tokenizer: Any
    vocab_size: int
    num_positions: int | None = None
    rope_limits: Sequence[int] = ()
    is_packed = True

    @abc.abstractmethod
    def load(self, args: argparse.Namespace) -> None:
        """Make the model as the flags say. Collective."""

    @abc.abstractmethod
    def scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (loss tokens, vocabulary) where rows have targets, and these (loss tokens,)."""

    @abc.abstractmethod
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (1, length, vocabulary) of one sample (1, length), with nothing beside it."""

    @abc.abstractmethod
    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities (loss tokens,) of the targets of rows, row by row."""

    @abc.abstractmethod
    def adapt(self, args: argparse.Namespace) -> None:
        """4 bits and adapters, as the flags say. Collective."""

    @abc.abstractmethod
    def save(self, args: argparse.Namespace) -> None:
        """Write what was trained, with the tokenizer, into --save. Collective."""

    @abc.abstractmethod
    def answer(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> list[int]:
        """The likeliest ids behind `ids` (1, length). Collective.

        With options as of transformers' `generate`, which may be `do_sample`, `temperature` and
        `top_p`, they are drawn, and `seed` says how.
        """

    def flops(self, length: int) -> float | None:
        """Of a token of rows so long; None where that is not known."""
        return None

    def notes(self) -> list[str]:
        """What of the model is not computed as its own program would."""
        return []

    def take_lengths(self, lengths: npt.NDArray[np.int64], args: argparse.Namespace) -> None:
        """Choose `is_packed` for what shares micro-batches, of so many tokens each.

        Raises:
            ConfigError: where a sample would be computed otherwise beside some than alone.
        """
        for limit in self.rope_limits:
            if (lengths > limit).all() or (lengths <= limit).all():
                continue
            if args.batch_size > 1 or args.objective.takes_pairs:
                raise ConfigError(
                    f"{_by_longest_row(args, limit, 'longrope')} Give --max-length {limit}, or "
                    "--batch-size 1 with more --gradient-accumulation."
                )
            self.is_packed = False

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The cross-entropy of all targets of rows, summed."""
        return bmt.loss.FusedCrossEntropy(reduction="sum")(*self.scores(batch))


class NativeModel(TrainedModel):
    """A decoder of this package."""

    model: CausalModel

    def __init__(
        self, kind: type[CausalModel], name: str, vocabulary: Vocabulary | None = None
    ) -> None:
        self._kind = kind
        self._lora: Lora | None = None
        self.tokenizer = vocabulary.tokenizer if vocabulary else tokenizer_of(kind, name)
        config: Any = kind._CONFIG_TYPE.from_pretrained(name)
        self.vocab_size = (vocabulary and vocabulary.vocab_size) or config.vocab_size
        self._changes: dict[str, Any] = {}  # of the configuration
        if vocabulary is not None:
            file = config.hugging_face or {}
            special = vocabulary.special_ids().items()
            self._changes = {
                "vocab_size": self.vocab_size,
                "special_ids": {key: number for key, number in special if number is not None},
                "hugging_face": {
                    key: value for key, value in file.items() if key not in SPECIAL_IDS
                },
            }

    def load(self, args: argparse.Namespace) -> None:
        """As in TrainedModel."""
        make = untrained if args.from_scratch else pretrained
        self.model = make(self._kind, args, **self._changes)
        self.trunk = self.model
        self.num_positions = self.model.num_positions

    def scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As in TrainedModel."""
        in_loss = batch["targets"] != -100
        return self.model.logits(self._hidden(batch)[in_loss]), batch["targets"][in_loss]

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """As in TrainedModel; without all scores in memory."""
        in_loss = batch["targets"] != -100
        return self.model.log_probs(self._hidden(batch)[in_loss], batch["targets"][in_loss])

    def _hidden(self, batch: Batch) -> torch.Tensor:
        apart: dict[str, Any] = {}
        if "segments" in batch:
            apart["attention_mask"] = AttentionMask(causal=True, segments=batch["segments"])
            apart["position_ids"] = self.model.position_ids_of(batch["position_ids"])
        out = self.model(batch["input_ids"], **apart, output_logits=False)
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """As in TrainedModel."""
        found: torch.Tensor = self.model(ids).logits
        return found

    def adapt(self, args: argparse.Namespace) -> None:
        """As in TrainedModel."""
        if args.load_in_4bit:
            quantize(self.model)
        if args.lora_rank:
            targets = args.lora_targets or ATTENTION
            how = args.lora_rank, args.lora_alpha, args.lora_dropout
            self._lora = Lora(self.model, *how, targets, args.model_config)

    def save(self, args: argparse.Namespace) -> None:
        """As in TrainedModel."""
        if self._lora is None:
            save_model(self.model, args, self.tokenizer)
        elif args.save is not None:
            self._lora.save(pathlib.Path(args.save, args.save_name or "adapter"), self.tokenizer)

    def answer(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> list[int]:
        """As in TrainedModel."""
        end = self.tokenizer.eos_token_id
        found = generate(
            self.model, ids, eos_token_id=end, max_new_tokens=max_new_tokens, **options
        )
        return list(found.rows()[0])

    def flops(self, length: int) -> float | None:
        """As in TrainedModel."""
        return flops_per_token(self.model, length)


class TransformersModel(TrainedModel):
    """Any causal language model of transformers, of which this package has no class."""

    model: Any
    # what transformers and peft call models of this kind
    _AUTO, _TASK = "AutoModelForCausalLM", "CAUSAL_LM"
    _MAPPING, _KIND = "MODEL_FOR_CAUSAL_LM_MAPPING", "causal language model"
    _head: Head | None = None  # what makes scores of the last hidden states; None if unknown
    _are_scores_large = False
    # whether samples of a row are kept apart by a mask that is given, not by their positions
    _gives_masks = False

    def __init__(self, name: str, vocabulary: Vocabulary | None = None) -> None:
        self._auto = package("transformers", "a model that is none of this package", ConfigError)
        self._models = package("transformers.models.auto.modeling_auto", name, ConfigError)
        self._folder = resolve(name, "config")
        self.config = attempt(lambda: self._configuration(name), everyone(), ConfigError)
        if vocabulary is None:
            self.read_tokenizer(resolve(name, "tokenizer"))
        else:
            self._take(vocabulary)
        self.vocab_size = self.config.get_text_config().vocab_size
        self._is_adapted = False

    def _take(self, vocabulary: Vocabulary) -> None:
        self.tokenizer, text = vocabulary.tokenizer, self.config.get_text_config()
        text.vocab_size = vocabulary.vocab_size or text.vocab_size
        for config in (self.config, text):
            config.update(vocabulary.special_ids())

    def _configuration(self, name: str) -> Any:
        try:
            config = self._auto.AutoConfig.from_pretrained(self._folder)
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"{name} is a model that neither this package nor transformers "
                f"{self._auto.__version__} knows: {error}"
            ) from error
        if type(config) not in vars(self._models)[self._MAPPING]:
            raise ConfigError(f"{name} is a {config.model_type}: expected a {self._KIND}.")
        if vars(config).get("quantization_config"):
            raise ConfigError(
                f"the weights of {name} are quantised: name a folder with 16-bit weights."
            )
        return config

    def load(self, args: argparse.Namespace) -> None:
        """Weights are read slice by slice; first values are those of transformers."""
        accelerate = package("accelerate", "a model of transformers", ConfigError)
        dtype, auto = DTYPES[args.dtype], getattr(self._auto, self._AUTO)
        self.rope_limits = self._longrope_limits(args)
        torch.manual_seed(args.seed)
        if args.from_scratch:
            model = auto.from_config(self.config, dtype=dtype)
        else:
            # parameters on meta, buffers with their values, which no file has
            with accelerate.init_empty_weights(include_buffers=False):
                model = auto.from_config(self.config, dtype=dtype)
            model.tie_weights()
        self._keep_in_fp32(model)
        self._prepare(model)
        self.num_positions = self._table_of_positions(model)
        self.trunk = model.base_model
        model = bmt.BMTrainModelWrapper(model, use_checkpoint=args.use_checkpoint)
        if not args.from_scratch or args.load:
            self._load_weights(model, args.load or resolve(args.model_config, "model"))
        self.model = model.train()
        self._takes = {*inspect.signature(model.forward).parameters}
        scores = args.batch_size * args.max_length * self.vocab_size * dtype.itemsize
        self._are_scores_large = scores > LARGE
        self._probe_packing(args)

    def _longrope_limits(self, args: argparse.Namespace) -> list[int]:
        """The `rope_limits` of transformers' longrope, those that some row exceeds.

        Raises:
            ConfigError: where the frequencies also depend on the batches before ("dynamic").
        """
        text, found = self.config.get_text_config(), []
        limit = getattr(text, "max_position_embeddings", 0)
        # transformers 4 has them in `rope_scaling`; some models have them for each kind of layer
        given = vars(text).get("rope_parameters") or vars(text).get("rope_scaling") or {}
        for rope in [one for one in given.values() if isinstance(one, dict)] or [given]:
            kind = rope.get("rope_type", rope.get("type"))
            if kind == "longrope":
                original = "original_max_position_embeddings"
                found.append(rope.get(original) or getattr(text, original, None) or limit)
            if kind == "dynamic" and args.max_length > limit:
                raise ConfigError(
                    f"{_by_longest_row(args, limit, kind)} Give --max-length {limit}."
                )
        return [limit for limit in found if args.max_length > limit]

    def _table_of_positions(self, model: Any) -> int | None:
        """How many positions a model has that keeps them in a table; None where they are computed.

        transformers reads behind the end of the table: an error of an index in the first step.
        """
        most: int | None = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        words = model.get_input_embeddings()
        learnt = (m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding))
        others = [size for size in learnt if size != words.num_embeddings]
        kept = [buffer.shape[0] for buffer in model.buffers() if buffer.dim() > 1]
        # tables of some models begin with two rows for padding
        is_table = most and any(most <= size <= most + 2 for size in [*others, *kept])
        return most if is_table else None

    def _prepare(self, model: Any) -> None:
        """Give values to what no file has."""

    def _load_weights(self, model: Any, path: str) -> None:
        """Read the weights."""
        load_transformers(model, path)

    @staticmethod
    def _keep_in_fp32(model: Any) -> None:
        """What transformers keeps in fp32 whatever the model's dtype is."""
        names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        for name, param in model.named_parameters():
            if any(part in names for part in name.split(".")):
                param.data = param.data.float()

    @torch.no_grad()
    def _probe_packing(self, args: argparse.Namespace) -> None:
        """Find out what the model does with the tokens of a row. Collective.

        A token must be computed as if nothing followed. The first token of a second sample should
        be computed as if nothing was before it, which a model does not do that mixes along the row
        by other means than attention, or whose positions are not those it is given.

        Raises:
            ConfigError: for one whose tokens see those that follow.
        """
        self.model.eval()
        length = 24
        one, other, second = (
            torch.arange(3 * length, device=bmt.device()).view(3, 1, length)
            * 7
            % min(self.vocab_size, 997)
        )
        changed = torch.cat([second[:, :1], other[:, 1:]], 1)
        places = torch.arange(length, device=bmt.device())[None]
        twice = {"position_ids": places.repeat(1, 2)}
        first = self._first({"input_ids": second})
        found = [self._is_same(first, self._first({"input_ids": changed})), *[False] * 4]
        head = head_of(self.config.get_text_config())
        found[4] = self._scores_by(head, {"input_ids": second})
        if "position_ids" in self._takes:
            found[1] = self._is_same(
                first, self._first({"input_ids": second, "position_ids": places})
            )
            # rows with the sample behind each of the others, and before it
            rows = [
                {"input_ids": torch.cat(pair, 1), **twice}
                for x in (one, other)
                for pair in ([x, second], [second, x])
            ]
            found[2] = self._is_apart(first, rows)
            found[3] = not found[2] and self._is_apart_by_masks(first, rows)
        self.model.train()
        flags = torch.tensor(found, dtype=torch.float32, device=bmt.device())
        is_causal, has_positions, is_apart, is_masked, is_known = (
            bmt.sum_loss(flags) == 1
        ).tolist()
        if not is_causal:
            raise ConfigError(
                f"{args.model_config} is not configured as a causal language model: its tokens "
                "attend to later ones."
            )
        if not has_positions:
            self._takes.discard("position_ids")
        self._head = head if is_known else None
        self._gives_masks = is_masked and not is_apart
        self.is_packed = has_positions and (is_apart or is_masked)

    def _is_apart(self, first: torch.Tensor, rows: list[dict[str, torch.Tensor]]) -> bool:
        """Whether a sample is computed as alone behind each of two others.

        16 bits round more than some models mix, so the two are also compared with each other. They
        may differ as much as the sample does before one of the others: experts get tokens in groups
        of the same sizes there.
        """
        length = rows[0]["input_ids"].shape[1] // 2
        behind = [self._first(row, length) for row in rows[::2]]
        before = [self._first(row) for row in rows[1::2]]
        noise = float((before[0] - before[1]).std())
        mixed = float((behind[0] - behind[1]).std())
        is_right = all(self._is_same(first, one) for one in behind)
        return is_right and mixed <= max(8 * noise, 1e-4 * float(first.std()))

    def _is_apart_by_masks(self, first: torch.Tensor, rows: list[dict[str, torch.Tensor]]) -> bool:
        """The same where the model is given masks."""
        try:
            masks = self._masks(rows[0]["input_ids"], rows[0]["position_ids"])
            return self._is_apart(first, [{**row, "attention_mask": masks} for row in rows])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError):
            return False  # it has layers that are masked otherwise

    def _masks(self, ids: torch.Tensor, places: torch.Tensor) -> Any:
        """What transformers masks by, for each kind of attention in the model, with samples apart
        that begin where positions (batch, length) do.
        """
        masking = package("transformers.masking_utils", "packing", ConfigError, name="transformers")
        like = torch.empty(*ids.shape, 1, dtype=self.model.dtype, device=ids.device)
        return masking.create_masks_for_generate(
            config=self.config,
            inputs_embeds=like,
            attention_mask=None,
            past_key_values=None,
            position_ids=places,
        )

    def _first(self, inputs: dict[str, torch.Tensor], place: int = 0) -> torch.Tensor:
        return self._logits(inputs)[0, place].float()

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Up to rounding: experts get their tokens in groups of other sizes."""
        rounding = 1e-3 if self.model.dtype == torch.float32 else 2e-2
        return bool((one - other).std() <= rounding * one.std())

    def _scores_by(self, head: Head, inputs: dict[str, torch.Tensor]) -> bool:
        """Whether this head makes the scores of the body's hidden states."""
        layer = self.model.get_output_embeddings()
        if self._body() is None or not isinstance(layer, torch.nn.Linear):
            return False
        found = head.scores(layer(self._hidden(inputs))).float()
        return self._is_same(found, self._logits(inputs).float())

    def _body(self) -> Any:
        """What makes the hidden states; None of a model that names it otherwise."""
        model = self.model.get_base_model() if self._is_adapted else self.model
        return dict(model.named_children()).get(model.base_model_prefix)

    def _hidden(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """As the head takes them: some bodies compute in fp32 beside weights in 16 bits."""
        out: torch.Tensor = self._body()(**self._completed(inputs)).last_hidden_state
        return out.to(self.model.get_output_embeddings().weight.dtype)

    def _logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.model(**self._completed(inputs)).logits
        return out

    def _completed(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "use_cache" in self._takes:
            inputs["use_cache"] = False  # type: ignore[assignment]
        # Models that also see pictures want to be told which tokens are some.
        if "token_type_ids" in self._takes and "pixel_values" in self._takes:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        return inputs

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """As in TrainedModel."""
        return self._logits({"input_ids": ids})

    def _inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": batch["input_ids"]}
        if "position_ids" in self._takes and "position_ids" in batch:
            inputs["position_ids"] = batch["position_ids"]
        if not self.is_packed and "segments" in batch:
            inputs["attention_mask"] = (batch["segments"] > 0).long()
        elif self._gives_masks:
            inputs["attention_mask"] = self._masks(batch["input_ids"], batch["position_ids"])
        return inputs

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """As in TrainedModel; without all scores in memory where they would be large."""
        if self._head is None or not self._are_scores_large:
            return super().loss_sum(batch)
        return self._head.losses(*self._head_inputs(batch), reduction="sum")

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """As in TrainedModel; without all scores in memory where it is known how they are made."""
        if self._head is None:
            return -bmt.loss.FusedCrossEntropy(reduction="none")(*self.scores(batch))
        return -self._head.losses(*self._head_inputs(batch), reduction="none")

    def _head_inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
        in_loss = batch["targets"] != -100
        hidden = self._hidden(self._inputs(batch))[in_loss]
        return hidden, self.model.get_output_embeddings(), batch["targets"][in_loss]

    def notes(self) -> list[str]:
        """As in TrainedModel."""
        if not vars(self.config.get_text_config()).get("output_router_logits"):
            return []
        return ["the loss that balances experts (output_router_logits) is not computed"]

    def scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As in TrainedModel."""
        inputs = self._inputs(batch)
        in_loss = batch["targets"] != -100
        # Columns that some row learns: scores take the most memory of all.
        if "logits_to_keep" in self._takes:
            columns = in_loss.any(0).nonzero()[:, 0]
            inputs["logits_to_keep"] = columns
            in_loss = in_loss[:, columns]
            targets = batch["targets"][:, columns]
        else:
            targets = batch["targets"]
        return self._logits(inputs)[in_loss], targets[in_loss]

    def adapt(self, args: argparse.Namespace) -> None:
        """As in TrainedModel."""
        targets = layers_to_adapt(self.model, args.lora_targets) if args.lora_rank else {}
        if args.load_in_4bit:
            self.quantize()
        if not args.lora_rank:
            return
        peft = package("peft", "LoRA", ConfigError, instead="use all weights, without adapters")
        config = peft.LoraConfig(
            r=args.lora_rank,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            task_type=self._TASK,
            modules_to_save=self._trained_heads() or None,
            **targets,
        )
        try:
            model = _quietly(lambda: peft.get_peft_model(self.model, config))
        except ValueError as error:
            named = " ".join(args.lora_targets or ["(default)"])
            raise ConfigError(f"--lora-targets {named}: {error}") from error
        model.peft_config["default"].base_model_name_or_path = args.model_config
        self.model = bmt.BMTrainModelWrapper(model, use_checkpoint=args.use_checkpoint)
        self._is_adapted = True

    def _trained_heads(self) -> list[str]:
        """Modules that are trained whole beside adapters."""
        return []

    def save(self, args: argparse.Namespace) -> None:
        """As in TrainedModel."""
        if args.save is None:
            return
        name = args.save_name or ("adapter" if self._is_adapted else "model")
        folder = pathlib.Path(args.save, name)
        make = adapter_staging if self._is_adapted else Staging
        staging = attempt(
            lambda: make(folder) if bmt.rank() == 0 else None, everyone(), WeightsError
        )
        place = staging.path() if staging is not None else folder
        try:
            with writing(folder):
                self.model.save_pretrained(str(place))
            attempt(lambda: self._commit(staging), everyone(), WeightsError)
        except BaseException:
            if staging is not None:
                staging.abandon()
            raise

    def _commit(self, staging: Staging | None) -> None:
        if staging is None:
            return
        with writing(staging.folder):
            save_tokenizer(self.tokenizer, staging.path())
            staging.commit()

    def quantize(self) -> None:
        """Keep the weights of linear layers in 4 bits. Collective."""
        names, head = irreplaceable(self.model), self.model.get_output_embeddings()
        layers = self.model.named_modules(remove_duplicate=False)
        kept = [layer for path, layer in layers if path.rpartition(".")[2] in names]
        quantize(self.model, [head, *kept])

    def add_adapters(self, folder: pathlib.Path) -> None:
        """Put the adapters of a folder beside the model's layers. Collective.

        Raises:
            ConfigError: for a folder without adapters that fit.
        """
        peft = package("peft", "LoRA", ConfigError, instead="use all weights, without adapters")
        try:
            model = _quietly(lambda: peft.PeftModel.from_pretrained(self.model, str(folder)))
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"{folder} holds no adapters for this model: {error}") from error
        self.model = bmt.BMTrainModelWrapper(model, use_checkpoint=False)

    def read_tokenizer(self, folder: str) -> None:
        """Take the tokenizer of another folder. Collective."""
        self.tokenizer = attempt(
            lambda: self._auto.AutoTokenizer.from_pretrained(folder), everyone(), ConfigError
        )

    @torch.no_grad()
    def answer(self, ids: torch.Tensor, max_new_tokens: int, **options: Any) -> list[int]:
        """As in TrainedModel."""
        was_training = self.model.training
        self.model.eval()
        ids, device = ids.to(bmt.device()), bmt.device()
        seed = options.pop("seed", None)
        # what is drawn here must not change what a run draws after it
        others = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(others, enabled=seed is not None, device_type=device.type):
            if seed is not None:
                torch.manual_seed(seed)
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                **{"do_sample": False, **options},
                pad_token_id=self.tokenizer.pad_token_id or 0,
            )
        self.model.train(was_training)
        found: list[int] = out[0, ids.shape[1] :].tolist()
        return found


class RewardModel(TransformersModel):
    """A model of transformers with a head of one number, which is a conversation's reward.

    The number is that of the last token which is no padding, as transformers finds it.
    """

    _AUTO, _TASK = "AutoModelForSequenceClassification", "SEQ_CLS"
    _MAPPING = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"
    _KIND = "model that transformers has with a head for sequences"
    is_packed = False

    def __init__(self, name: str, vocabulary: Vocabulary | None = None) -> None:
        super().__init__(name, vocabulary)
        self.config.update(reward_config(self.tokenizer))

    def _prepare(self, model: Any) -> None:
        names = [name for name, _ in model.named_parameters() if not self._is_of_body(model, name)]
        for name in names:
            owner, _, leaf = name.rpartition(".")
            old = model.get_parameter(name)
            std = vars(self.config.get_text_config()).get("initializer_range", 0.02)
            new = torch.empty(old.shape, dtype=old.dtype).normal_(
                0.0, std if old.dim() > 1 else 0.0
            )
            model.get_submodule(owner).register_parameter(leaf, torch.nn.Parameter(new))
        self._heads = sorted({name.partition(".")[0] for name in names})

    @staticmethod
    def _is_of_body(model: Any, name: str) -> bool:
        return name.startswith(f"{model.base_model_prefix}.")

    def _load_weights(self, model: Any, path: str) -> None:
        """A language model's weights, or those of a reward model, head and all."""
        found = load_transformers(model, path, strict=False)
        missing = [name for name in found.missing_keys if self._is_of_body(model, name)]
        others = [name for name in found.unexpected_keys if self._is_of_body(model, name)]
        if missing or others:
            raise WeightsError(f"{path} does not fit the model: {[*missing, *others][:5]}.")

    def _probe_packing(self, args: argparse.Namespace) -> None:
        """As in TransformersModel; rewards have nothing that could be mixed or seen too early."""

    def _trained_heads(self) -> list[str]:
        return self._heads

    def rewards(self, batch: Batch) -> torch.Tensor:
        """Of rows, float32 (rows,)."""
        inputs = {"input_ids": batch["input_ids"]}
        inputs["attention_mask"] = (batch["segments"] > 0).long()
        return self._logits(inputs)[:, 0].float()


def _by_longest_row(args: argparse.Namespace, limit: int, kind: str) -> str:
    return (
        f"--max-length {args.max_length}: beyond {limit} tokens this model's rotary embedding "
        f"({kind}) takes its frequencies from the longest row of a micro-batch, so that results "
        "would depend on the number of ranks."
    )


def reward_config(tokenizer: Any) -> dict[str, int]:
    """What the configuration of a reward model says: its head, and the padding behind the token
    that it reads, which is the tokenizer's, made of its end token where it has none.

    Raises:
        ConfigError: for a tokenizer that has neither.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise ConfigError(
            "the tokenizer has neither a token of padding nor an end token, so a reward model "
            "cannot tell the last token of a row: set its pad_token."
        )
    return {"pad_token_id": tokenizer.pad_token_id, "num_labels": 1}


def irreplaceable(model: Any) -> dict[str, str]:
    """The names of linear layers of a model of transformers that neither an adapter nor 4 bits can
    stand in for, and why: a module reads the layer's weight and does not call it (kernels of Mamba
    do more than the layer), as the loss does with the head, or the layer is of a class of its own
    (a router that returns more).
    """
    head = model.get_output_embeddings()
    found = {
        name.rpartition(".")[2]: "is the head, whose weight the loss reads"
        for name, module in model.named_modules()
        if module is head
    }
    children: dict[tuple[type, str], type[torch.nn.Linear]] = {}
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Linear):
                children[type(module), name] = type(child)
    for (kind, name), layer in children.items():
        # a sharded module is of a class of its own, which computes as the layer does
        if not _is_linear(layer):
            found[name] = f"is a {layer.__name__}"
        elif name in WEIGHT_READ.findall(inspect.getsource(kind)):
            found[name] = f"is not called: {kind.__name__} reads its weight"
    return found


def _is_linear(kind: type[torch.nn.Module]) -> bool:
    """Whether layers of a class compute what torch's linear layers do (Falcon's are of their own
    class).
    """
    if kind.forward is torch.nn.Linear.forward:
        return True
    layer = torch.nn.Linear(2, 1, device="meta")  # draws no numbers
    layer.weight = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    layer.bias = torch.nn.Parameter(torch.tensor([3.0]))
    try:
        found: Any = kind.forward(layer, torch.tensor([[4.0, 5.0]]))
    except Exception:  # it needs what only its own class has
        return False
    return isinstance(found, torch.Tensor) and found.tolist() == [[17.0]]


def layers_to_adapt(model: Any, targets: Sequence[str] | None) -> dict[str, Any]:
    """What a configuration of peft says of the layers of a model of transformers that get adapters:
    the projections of attention, of a model without any all linear layers.

    Raises:
        ConfigError: for a layer beside which an adapter would not be computed.
    """
    without = irreplaceable(model)
    for name in targets or ():
        if name in without:
            raise ConfigError(
                f"--lora-targets: {name} {without[name]}, and an adapter beside it would not be "
                "computed. Name other layers."
            )
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()} - {*without}
    chosen = list(targets or (name for name in TRANSFORMERS_ATTENTION if name in names)) or [ALL]
    return {
        "target_modules": ALL if chosen == [ALL] else chosen,
        "exclude_modules": sorted(without) or None,
    }


def _quietly(make: Callable[[], Any]) -> Any:
    """Without what peft is told of its use of transformers: it is no matter of the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return make()


def tokenizer_of(kind: type, folder: str) -> Any:
    """The tokenizer in a folder, or of a known name, for a class of this package; one that has none
    of its own reads the tokens of the class that it is built on, or what transformers sees.
    """
    own = [TOKENIZERS[base.__name__] for base in kind.__mro__ if base.__name__ in TOKENIZERS]
    auto = package("transformers", f"the tokenizer of {kind.__name__}", ConfigError).AutoTokenizer
    return (own or [auto])[0].from_pretrained(folder)


def native_class(name: str) -> type[CausalModel] | None:
    """The class of this package for a folder or a known name; None if it is for transformers.
    Collective.

    Raises:
        ConfigError, IdentifierError: for one that is not known, or no causal language model.
    """
    content = read_json(pathlib.Path(resolve(name, "config"), CONFIG_FILE))
    kind = content.get("model_type")
    if kind is None:
        raise ConfigError(
            f"the configuration of {name} names no model_type: make it one of Hugging Face by "
            "python -m model_center convert --to hf."
        )
    own = CLASSES.get(kind)
    is_causal = any(str(one).endswith("ForCausalLM") for one in content.get("architectures") or ())
    if own is None or (not issubclass(own, TokenModel | Llama) and is_causal):
        return None
    if not issubclass(own, CausalModel):
        raise ConfigError(
            f"{name} is a {own.__name__}: expected a CausalModel or a subclass of it."
        )
    return own


def trained_model_of(
    name: str, *, is_reward: bool = False, vocabulary: Vocabulary | None = None
) -> TrainedModel:
    """The model of a folder or of a known name, not loaded yet. Collective.

    Args:
        name: of the model.
        vocabulary: in place of its own.
        is_reward: whether it gets a head of one number.

    Raises:
        ConfigError, IdentifierError: for one that is not known, or no causal language model.
    """
    own = None if is_reward else native_class(name)
    # GPT-J's files have one norm where our class has two, which training would part.
    if own is None or own is GPTj:
        return (RewardModel if is_reward else TransformersModel)(name, vocabulary)
    if not issubclass(own, TokenModel | Llama):
        raise ConfigError(
            f"{own.__name__} cannot be trained by this command: use a program of your own."
        )
    return NativeModel(own, name, vocabulary)
