"""BaseModel: what all models do alike, which is to come from files and to go into them."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch

import bmtrain as bmt
from bmtrain.distributed.agreement import attempt, everyone
from model_center.config.base import Config
from model_center.errors import ConfigError, InputError, WeightsError
from model_center.hub.resolving import resolve
from model_center.layer.parameter import materialize
from model_center.layer.stack import ShardingPolicy
from model_center.model.decoding import Decoding
from model_center.weights.extras import NOTHING, FolderExtras, extras_of
from model_center.weights.keymap import KeyMap
from model_center.weights.loading import load_weights
from model_center.weights.saving import Changes, save_hugging_face, save_model_center

Model = TypeVar("Model", bound="BaseModel")

FORMATS = ("hf", "model_center")


class BaseModel(bmt.DistributedModule):
    """A model with its configuration, `config`.

    Made before `bmtrain.init_distributed` it is an ordinary module with ordinary parameters. Made
    after it, it is sharded, and gets its values from `from_pretrained`, `bmtrain.init_parameters`
    or `bmtrain.load`.
    """

    _CONFIG_TYPE: ClassVar[type[Config]] = Config
    # Where texts of a batch are padded for generation.
    PADDING_SIDE: ClassVar[str] = "right"
    # Whether the third argument of a call was the context in ModelCenter 0.1.
    HAD_CONTEXT_THIRD: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        if not isinstance(config, self._CONFIG_TYPE):
            raise ConfigError(
                f"{type(self).__name__} got {type(config).__name__}: expected "
                f"{self._CONFIG_TYPE.__name__}."
            )
        super().__init__()
        self.config: Any = config
        self.origin = NOTHING  # what its folder holds beside, on the rank that writes

    def __call__(self, *args: Any, return_logits: Any = False, **kwargs: Any) -> Any:
        """What `forward` returns; with `return_logits` the scores alone, as in ModelCenter 0.1.

        Raises:
            InputError: for outputs beside those of `return_logits`; for arguments by position that
                mean something else in another release of ModelCenter.
        """
        # There `context` and `span` followed, always both; nothing tells them from a mask.
        if self.HAD_CONTEXT_THIRD and len(args) > 3 and args[2] is not None:
            raise InputError(
                f"{type(self).__name__} got {len(args)} arguments by position: the third is the "
                "context in ModelCenter to 0.1.3 and the attention mask from 0.1.5 on. Give it and "
                "those that follow by name (context=, span=, or attention_mask=)."
            )
        if return_logits:
            if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
                raise InputError(
                    "return_logits returns the scores alone: give output_logits=True for the rest "
                    "too."
                )
            kwargs |= {"output_logits": True, "return_dict": True}
        out = super().__call__(*args, **kwargs)
        return out.logits if return_logits else out

    @classmethod
    def key_map(cls, config: Any) -> KeyMap:
        """Where each of the model's tensors is in a Hugging Face checkpoint."""
        raise ConfigError(f"{cls.__name__} has no counterpart in Hugging Face.")

    @classmethod
    def from_pretrained(
        cls: type[Model],
        pretrained_model_name_or_path: str | os.PathLike[str],
        config: Config | None = None,
        *,
        strict: bool = True,
        **kwargs: Any,
    ) -> Model:
        """A model with the weights of a folder or known name. Collective; ranks read their shards.

        Args:
            pretrained_model_name_or_path: a folder of ModelCenter (config.json, pytorch_model.pt)
                or Hugging Face (config.json, safetensors or .bin files), a name the project knows,
                or a Hugging Face repository.
            config: used instead of the folder's.
            strict: whether tensors that the files lack are an error, but for new heads; else they
                get their first values, and are named in a warning.
            kwargs: values that replace those of the folder's configuration, `dtype=torch.bfloat16`
                for example.

        Raises:
            IdentifierError: for an unknown name.
            ConfigError: for a folder without configuration, or one of another model.
            WeightsError: for files that are missing or do not fit the model; new heads are
                initialised and named instead.
        """
        if config is not None and kwargs:
            raise ConfigError(
                f"from_pretrained got a config and {', '.join(kwargs)} as well: set those "
                "in the config."
            )
        folder = pathlib.Path(resolve(str(pretrained_model_name_or_path), "model"))
        if config is None:  # of the folder of the weights, which it may depend on
            config = cls._CONFIG_TYPE.from_pretrained(folder, **kwargs)
        model = cls.without_values(config)
        model.load_folder(folder, strict=strict)
        return model

    def load_folder(self, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Load the weights of a folder or file, and keep what else an export needs. Collective.

        Args:
            folder: as of `from_pretrained`, or one file of weights.
            strict: whether tensors that the files lack are an error, but for new heads.

        Raises:
            WeightsError: for files that are missing or do not match the model.
        """
        load_weights(self, folder, self._map_of(self.config), strict=strict)
        self.origin = attempt(
            lambda: self._origin_in(pathlib.Path(folder)) if bmt.rank() == 0 else NOTHING,
            everyone(),
            WeightsError,
        )

    def _origin_in(self, folder: pathlib.Path) -> FolderExtras:
        """What the folder holds that models of its own configuration do not."""
        if not folder.is_dir():
            return NOTHING
        content, config = self.config.hugging_face, self.config
        if content is None:
            return extras_of(folder, None)
        with contextlib.suppress(ConfigError):  # which was read with other values in some places
            config = self._CONFIG_TYPE.from_dict(content)
        return extras_of(folder, self._map_of(config))

    @classmethod
    def without_values(cls: type[Model], config: Config) -> Model:
        """The model, its parameters without values: to be filled from a file."""
        with contextlib.nullcontext() if bmt.is_initialized() else torch.device("meta"):
            model = cls(config)
        materialize(model)
        return model

    @classmethod
    def from_json_file(cls: type[Model], json_file: str | os.PathLike[str], **kwargs: Any) -> Model:
        """A model with initial values, of the configuration in `json_file`. Collective.

        `kwargs` are values that replace those of the file.

        Raises:
            ConfigError: on every rank, for a file that is missing or has unknown keys.
        """
        model = cls(
            attempt(
                lambda: cls._CONFIG_TYPE.from_json_file(json_file, **kwargs),
                everyone(),
                ConfigError,
            )
        )
        if bmt.is_initialized():
            bmt.init_parameters(model)
        return model

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        format: str = "hf",
        max_shard_size: str | int = "5GB",
        tokenizer: Any = None,
    ) -> None:
        """Write config.json and the weights. Collective in a process group; rank 0 writes.

        Of a model that came from a folder of Hugging Face, what else was there is written too:
        entries of config.json, tensors without a place in the model (in "hf"), the tokenizer's
        files, settings of generation.

        Args:
            folder: made if it is not there.
            format: "hf" for safetensors that `transformers` loads, "model_center" for
                pytorch_model.pt in our names.
            max_shard_size: of one safetensors file, in bytes or as "5GB".
            tokenizer: saved beside, if given.

        Raises:
            ConfigError: for another format, or a model that Hugging Face does not have.
            WeightsError: on every rank, if the files cannot be written.
        """
        path = pathlib.Path(folder)
        if format not in FORMATS:
            raise ConfigError(f"format is {format!r}: expected one of {', '.join(FORMATS)}.")
        if format == "hf":
            content = self.config.hugging_face_content(tokenizer)
            save_hugging_face(
                self,
                path,
                self.key_map(self.config),
                content,
                max_shard_size,
                tokenizer,
                self.origin,
                self.changes(),
            )
        else:
            save_model_center(self, path, self.config.to_dict(), tokenizer, self.origin)

    def changes(self) -> Changes:
        """What becomes of tensors, by name, on their way into Hugging Face's format. Collective."""
        return {}

    @property
    def num_positions(self) -> int | None:
        """The longest sequence for which the model has positions; None for any."""
        return None

    @property
    def shortest_prompt(self) -> int:
        """The fewest tokens that a generation can begin with."""
        return 1

    def decoding(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]
    ) -> Decoding:
        """The beginning of a generation; see `model_center.generation.engine.generate`.

        Args:
            input_ids: int64 (rows, length).
            mask: bool of the same shape, False where they are padding; None where none is.
            inputs: what else the model takes, by name.

        Raises:
            InputError: for a model that does not generate, or inputs that it does not take.
        """
        raise InputError(
            f"{type(self).__name__} does not generate text: expected a decoder-only or an "
            "encoder-decoder model."
        )

    @classmethod
    def _map_of(cls, config: Any) -> KeyMap | None:
        return cls.key_map(config) if config.model_type else None


def policy_of(config: Config) -> ShardingPolicy:
    """How the layers of a model of this configuration are sharded."""
    return ShardingPolicy(use_checkpoint=config.use_checkpoint, zero_level=config.zero_level)
