"""What `python -m model_center train` trains: a decoder of this package, or one of transformers.

Both are asked the same: the loss of packed rows, adapters, 4 bits, an answer, files.
"""

from __future__ import annotations

import abc
import argparse
import inspect
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.distributed.agreement import attempt, everyone
from model_center.config.base import CONFIG_FILE, read_json
from model_center.dataset.packing import segment_mask
from model_center.errors import ConfigError, WeightsError
from model_center.generation import generate
from model_center.hub.resolving import resolve
from model_center.model.causal import CausalModel, TokenModel
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
THEIR_ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "dense"),
    *("query_key_value", "c_attn", "Wqkv", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    "kv_b_proj",
)


class Subject(abc.ABC):
    """A model and its tokenizer.

    Attributes:
        model: what is trained.
        trunk: the part of it whose `last_hidden_state` its head reads.
        tokenizer: whose chat template conversations are written by.
        vocab_size: ids that the model knows.
        num_positions: of the longest sequence that it can compute; None for any.
        is_packed: whether several samples may share a row without seeing one another.
    """

    model: torch.nn.Module
    trunk: torch.nn.Module
    tokenizer: Any
    vocab_size: int
    num_positions: int | None = None
    is_packed = True

    @abc.abstractmethod
    def load(self, args: argparse.Namespace) -> None:
        """Make the model as the flags say. Collective."""

    @abc.abstractmethod
    def scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (learnt, vocabulary) where rows have targets, and these (learnt,)."""

    @abc.abstractmethod
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (1, length, vocabulary) of one sample (1, length), with nothing beside it."""

    @abc.abstractmethod
    def log_probs(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities (learnt,) of the targets of rows, row by row."""

    @abc.abstractmethod
    def adapt(self, args: argparse.Namespace) -> None:
        """4 bits and adapters, as the flags say. Collective."""

    @abc.abstractmethod
    def save(self, args: argparse.Namespace) -> None:
        """Write what was trained, with the tokenizer, into --save. Collective."""

    @abc.abstractmethod
    def answer(self, ids: torch.Tensor, max_new_tokens: int) -> list[int]:
        """The likeliest ids behind `ids` (1, length). Collective."""

    def flops(self, length: int) -> float | None:
        """Of a token of rows so long; None where that is not known."""
        return None

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The cross-entropy of all targets of rows, summed."""
        return bmt.loss.FusedCrossEntropy(reduction="sum")(*self.scores(batch))


class OwnSubject(Subject):
    """A decoder of this package."""

    model: CausalModel

    def __init__(self, kind: type[CausalModel], name: str) -> None:
        self._kind = kind
        self._lora: Lora | None = None
        self.tokenizer = tokenizer_of(kind, name)
        config: Any = kind._CONFIG_TYPE.from_pretrained(name)
        self.vocab_size = config.vocab_size

    def load(self, args: argparse.Namespace) -> None:
        """As in Subject."""
        self.model = (untrained if args.from_scratch else pretrained)(self._kind, args)
        self.trunk = self.model
        self.num_positions = self.model.num_positions

    def scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As in Subject."""
        learnt = batch["targets"] != -100
        return self.model.logits(self._hidden(batch)[learnt]), batch["targets"][learnt]

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """As in Subject; without all scores in memory."""
        learnt = batch["targets"] != -100
        return self.model.log_probs(self._hidden(batch)[learnt], batch["targets"][learnt])

    def _hidden(self, batch: Batch) -> torch.Tensor:
        out = self.model(
            batch["input_ids"],
            attention_mask=segment_mask(batch["segments"]),
            position_ids=self.model.position_ids_of(batch["position_ids"]),
            output_logits=False,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """As in Subject."""
        found: torch.Tensor = self.model(ids).logits
        return found

    def adapt(self, args: argparse.Namespace) -> None:
        """As in Subject."""
        if args.load_in_4bit:
            quantize(self.model)
        if args.lora_rank:
            targets = args.lora_targets or ATTENTION
            how = args.lora_rank, args.lora_alpha, args.lora_dropout
            self._lora = Lora(self.model, *how, targets, args.model_config)

    def save(self, args: argparse.Namespace) -> None:
        """As in Subject."""
        if self._lora is None:
            save_model(self.model, args, self.tokenizer)
        elif args.save is not None:
            self._lora.save(pathlib.Path(args.save, args.save_name or "adapter"), self.tokenizer)

    def answer(self, ids: torch.Tensor, max_new_tokens: int) -> list[int]:
        """As in Subject."""
        end = self.tokenizer.eos_token_id
        found = generate(self.model, ids, eos_token_id=end, max_new_tokens=max_new_tokens)
        return list(found.rows()[0])

    def flops(self, length: int) -> float | None:
        """As in Subject."""
        return flops_per_token(self.model, length)


class TheirSubject(Subject):
    """Any causal language model of transformers, of which this package has no class."""

    model: Any
    # what transformers and peft call models of this kind
    _AUTO, _TASK = "AutoModelForCausalLM", "CAUSAL_LM"
    _MAPPING, _KIND = "MODEL_FOR_CAUSAL_LM_MAPPING", "causal language model"
    _is_head_plain = False  # whether scores are a linear map of the last hidden states, no more

    def __init__(self, name: str) -> None:
        self._auto = package("transformers", "a model that is none of this package", ConfigError)
        self._models = package("transformers.models.auto.modeling_auto", name, ConfigError)
        self._folder = resolve(name, "config")
        self.config = attempt(lambda: self._configuration(name), everyone(), ConfigError)
        tokens = resolve(name, "tokenizer")
        self.tokenizer = attempt(
            lambda: self._auto.AutoTokenizer.from_pretrained(tokens), everyone(), ConfigError
        )
        self.vocab_size = self.config.get_text_config().vocab_size
        self._is_adapted = False

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
                f"the weights of {name} are quantised: name a folder with those in 16 bits."
            )
        return config

    def load(self, args: argparse.Namespace) -> None:
        """As in Subject; weights are read slice by slice, and first values are transformers'."""
        accelerate = package("accelerate", "a model of transformers", ConfigError)
        dtype, auto = DTYPES[args.dtype], getattr(self._auto, self._AUTO)
        torch.manual_seed(args.seed)
        if args.from_scratch:
            model = auto.from_config(self.config, dtype=dtype)
        else:
            # parameters on meta, buffers with their values, which no file has
            with accelerate.init_empty_weights(include_buffers=False):
                model = auto.from_config(self.config, dtype=dtype)
            model.tie_weights()
        self._keep_exact(model)
        self._prepare(model)
        self.trunk = model.base_model
        model = bmt.BMTrainModelWrapper(model, use_checkpoint=args.use_checkpoint)
        if not args.from_scratch or args.load:
            self._fill(model, args.load or resolve(args.model_config, "model"))
        self.model = model.train()
        self._takes = {*inspect.signature(model.forward).parameters}
        self._look_at(args)

    def _prepare(self, model: Any) -> None:
        """Give values to what no file has."""

    def _fill(self, model: Any, path: str) -> None:
        """Read the weights."""
        bmt.load(model, path)

    @staticmethod
    def _keep_exact(model: Any) -> None:
        """What transformers keeps in fp32 whatever the model's dtype is."""
        names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        for name, param in model.named_parameters():
            if any(part in names for part in name.split(".")):
                param.data = param.data.float()

    @torch.no_grad()
    def _look_at(self, args: argparse.Namespace) -> None:
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
        found = [self._is_same(first, self._first({"input_ids": changed})), False, False]
        found.append(self._scores_by_head({"input_ids": second}))
        if "position_ids" in self._takes:
            found[1] = self._is_same(
                first, self._first({"input_ids": second, "position_ids": places})
            )
            rows = [{"input_ids": torch.cat([x, second], 1), **twice} for x in (one, other)]
            found[2] = all(self._is_same(first, self._first(row, length)) for row in rows)
        self.model.train()
        flags = torch.tensor(found, dtype=torch.float32, device=bmt.device())
        is_causal, has_positions, is_apart, self._is_head_plain = (
            bmt.sum_loss(flags) == 1
        ).tolist()
        if not is_causal:
            raise ConfigError(
                f"{args.model_config} is not configured as a causal language model: its tokens "
                "attend to later ones."
            )
        if not has_positions:
            self._takes.discard("position_ids")
        self.is_packed = has_positions and is_apart

    def _first(self, inputs: dict[str, torch.Tensor], place: int = 0) -> torch.Tensor:
        return self._logits(inputs)[0, place].float()

    def _is_same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Up to rounding: experts get their tokens in groups of other sizes."""
        rounding = 1e-3 if self.model.dtype == torch.float32 else 2e-2
        return bool((one - other).std() <= rounding * one.std())

    def _scores_by_head(self, inputs: dict[str, torch.Tensor]) -> bool:
        """Whether the head alone makes scores of the body's hidden states: some models scale or
        bound them.
        """
        head, body = self.model.get_output_embeddings(), self._body()
        bound = vars(self.config.get_text_config()).get("final_logit_softcapping")
        if bound or body is None or not isinstance(head, torch.nn.Linear):
            return False
        return torch.equal(head(self._hidden(inputs)), self._logits(inputs))

    def _body(self) -> Any:
        """What makes the hidden states; None of a model that names it otherwise."""
        model = self.model.get_base_model() if self._is_adapted else self.model
        return dict(model.named_children()).get(model.base_model_prefix)

    def _hidden(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self._body()(**self._completed(inputs)).last_hidden_state
        return out

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
        """As in Subject."""
        return self._logits({"input_ids": ids})

    def _inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": batch["input_ids"]}
        if "position_ids" in self._takes:
            inputs["position_ids"] = batch["position_ids"]
        if not self.is_packed:
            inputs["attention_mask"] = (batch["segments"] > 0).long()
        return inputs

    def log_probs(self, batch: Batch) -> torch.Tensor:
        """As in Subject; without all scores in memory where the head alone makes them."""
        if not self._is_head_plain:
            return -bmt.loss.FusedCrossEntropy(reduction="none")(*self.scores(batch))
        learnt, head = batch["targets"] != -100, self.model.get_output_embeddings()
        hidden = self._hidden(self._inputs(batch))[learnt]
        return bmt.loss.token_log_probs(hidden, head.weight, batch["targets"][learnt], head.bias)

    def scores(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As in Subject."""
        inputs = self._inputs(batch)
        learnt = batch["targets"] != -100
        # Columns that some row learns: scores take the most memory of all.
        if "logits_to_keep" in self._takes:
            columns = learnt.any(0).nonzero()[:, 0]
            inputs["logits_to_keep"] = columns
            learnt = learnt[:, columns]
            targets = batch["targets"][:, columns]
        else:
            targets = batch["targets"]
        return self._logits(inputs)[learnt], targets[learnt]

    def adapt(self, args: argparse.Namespace) -> None:
        """As in Subject."""
        if args.load_in_4bit:
            self.quantize()
        if not args.lora_rank:
            return
        peft = package("peft", "LoRA", ConfigError, instead="use all weights, without adapters")
        names = {name.rpartition(".")[2] for name, _ in self.model.named_modules()}
        targets = args.lora_targets or [name for name in THEIR_ATTENTION if name in names]
        config = peft.LoraConfig(
            r=args.lora_rank,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules=ALL if list(targets) in ([ALL], []) else list(targets),
            task_type=self._TASK,
            modules_to_save=self._heads_to_learn() or None,
        )
        try:
            model = _quietly(lambda: peft.get_peft_model(self.model, config))
        except ValueError as error:
            raise ConfigError(f"--lora-targets {' '.join(targets)}: {error}") from error
        model.peft_config["default"].base_model_name_or_path = args.model_config
        self.model = bmt.BMTrainModelWrapper(model, use_checkpoint=args.use_checkpoint)
        self._is_adapted = True

    def _heads_to_learn(self) -> list[str]:
        """Modules that are learnt whole beside adapters."""
        return []

    def save(self, args: argparse.Namespace) -> None:
        """As in Subject."""
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
        quantize(self.model, self.model.get_output_embeddings())

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
        """As in Subject; `options` are those of transformers' `generate`."""
        was_training = self.model.training
        self.model.eval()
        ids = ids.to(bmt.device())
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


class RewardSubject(TheirSubject):
    """A model of transformers with a head of one number, which is a conversation's reward.

    The number is that of the last token which is no padding, as transformers finds it.
    """

    _AUTO, _TASK = "AutoModelForSequenceClassification", "SEQ_CLS"
    _MAPPING = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"
    _KIND = "model that transformers has with a head for sequences"
    is_packed = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        tokenizer = self.tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.config.pad_token_id, self.config.num_labels = tokenizer.pad_token_id, 1

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

    def _fill(self, model: Any, path: str) -> None:
        """A language model's weights, or those of a reward model, head and all."""
        found = bmt.load(model, path, strict=False)
        missing = [name for name in found.missing_keys if self._is_of_body(model, name)]
        others = [name for name in found.unexpected_keys if self._is_of_body(model, name)]
        if missing or others:
            raise WeightsError(f"{path} does not fit the model: {[*missing, *others][:5]}.")

    def _look_at(self, args: argparse.Namespace) -> None:
        """As in TheirSubject; rewards have nothing that could be mixed or seen too early."""

    def _heads_to_learn(self) -> list[str]:
        return self._heads

    def rewards(self, batch: Batch) -> torch.Tensor:
        """Of rows, float32 (rows,)."""
        inputs = {"input_ids": batch["input_ids"]}
        inputs["attention_mask"] = (batch["segments"] > 0).long()
        return self._logits(inputs)[:, 0].float()


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


def own_class(name: str) -> type[CausalModel] | None:
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
            f"{name} is a {own.__name__}: expected a CausalModel, or what is built like one."
        )
    return own


def subject_of(name: str, *, is_reward: bool = False) -> Subject:
    """The model of a folder or of a known name, not loaded yet. Collective.

    Args:
        name: of the model.
        is_reward: whether it gets a head of one number.

    Raises:
        ConfigError, IdentifierError: for one that is not known, or no causal language model.
    """
    own = None if is_reward else own_class(name)
    if own is None:
        return RewardSubject(name) if is_reward else TheirSubject(name)
    if not issubclass(own, TokenModel | Llama):
        raise ConfigError(f"{own.__name__} is not trained by this program.")
    return OwnSubject(own, name)
