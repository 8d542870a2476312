"""Configurations: dataclasses, read from and written to config.json, ours or Hugging Face's."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch

from bmtrain.checkpoint.files import read_object
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.errors import CheckpointError
from bmtrain.runtime.arguments import unknown, with_nearest
from bmtrain.runtime.log import warn
from model_center.config.rules import GATED, check_fields
from model_center.errors import ArgumentError, ConfigError
from model_center.hub.resolving import resolve


class Positional(type):
    """The type of a class whose `arguments()` are the names of its first arguments, in order.

    Attributes:
        POSITIONS_END: why there are no more of them, for the error.
    """

    POSITIONS_END = ""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        """An object of the class.

        Raises:
            ArgumentError: for too many arguments by position, one that is given by name as well, or
                one that is not known.
        """
        names = cls.arguments() if args else ()
        if len(args) > len(names):
            raise ArgumentError(
                f"{cls.__name__} takes {len(names)} arguments by position: got {len(args)}. Give "
                f"the others by name.{cls.POSITIONS_END}"
            )
        by_position = dict(zip(names, args, strict=False))
        twice = sorted(by_position.keys() & given.keys())
        if twice:
            raise ArgumentError(f"{cls.__name__} got {', '.join(twice)} by position and by name.")
        problem = unknown(cls.__name__, given, inspect.signature(cls.__init__).parameters)  # type: ignore[misc]  # not of an object
        if problem is not None:
            raise ArgumentError(problem)
        return super().__call__(**by_position, **given)

    def arguments(cls) -> tuple[str, ...]:
        """Names of the arguments that may be given by position."""
        return ()

    @property
    def __signature__(cls) -> inspect.Signature:
        """Of a call of the class, for `help` and tools."""
        _, *named = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]  # not of an object
        by_name = {parameter.name: parameter for parameter in named}
        first = [
            by_name.pop(name).replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in cls.arguments()
        ]
        return inspect.Signature([*first, *by_name.values()])


Self = TypeVar("Self", bound="Config")

CONFIG_FILE = "config.json"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Of these the model knows nothing, but who generates with transformers does.
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
# How a run computes, not what the model is: not written to files.
OF_THE_RUN = ("dtype", "half", "use_checkpoint", "zero_level")
# Of the folder that it came from: not written to files of ModelCenter.
OF_THE_FILE = ("hugging_face",)


# ModelCenter's arguments from the norms on, which all models have.
ARGUMENTS = (
    "norm_init_var norm_bias norm_eps att_init_mean att_init_std att_bias att_mask_value "
    "ffn_init_mean ffn_init_std ffn_bias ffn_activate_fn proj_init_mean proj_init_std proj_bias "
    "length_scale attn_scale half int8"
)


@dataclasses.dataclass(kw_only=True)
class Config(metaclass=Positional):
    """The fields of every configuration.

    Attributes:
        half: fp16 if true, fp32 if not, where `dtype` is None.
        dtype: of parameters and computation: a torch.dtype or its name.
        int8: accepted; it does nothing, as in ModelCenter.
        use_checkpoint: recompute each layer in the backward pass instead of keeping its activations
            (in a process group).
        zero_level: 2 or 3, as in `bmtrain.Block`; None for the default given to `init_distributed`.
        special_ids: ids of special tokens under Hugging Face's names, `eos_token_id` for example,
            for its config.json.
        hugging_face: content of the Hugging Face config.json that it was read from, if any: what
            it says beyond this configuration goes into the file that is written.
    """

    model_type: ClassVar[str] = ""  # the name in Hugging Face's config.json
    architecture: ClassVar[str] = ""  # the name there of the class with the head of pre-training
    other_types: ClassVar[tuple[str, ...]] = ()  # further names there of what is the same

    # Our names to those there that say the same; with a second one, the value that a file means
    # which does not say it.
    HUGGING_FACE_NAMES: ClassVar[Mapping[str, str | tuple[str, Any]]] = {}

    half: bool = True
    dtype: Any = None
    int8: bool = False
    use_checkpoint: bool = True
    zero_level: int | None = None
    special_ids: dict[str, Any] | None = None
    hugging_face: dict[str, Any] | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check and settle what depends on several values.

        Raises:
            ConfigError: naming the value.
        """
        self.dtype = dtype_of(self.dtype, self.half)
        self.half = self.dtype == torch.float16

    @classmethod
    def from_pretrained(
        cls: type[Self], pretrained_model_name_or_path: str | os.PathLike[str], **overrides: Any
    ) -> Self:
        """Read config.json of a folder or known identifier, ours or Hugging Face's. Collective.

        Args:
            pretrained_model_name_or_path: a folder, a name the project knows, or a Hugging Face
                repository.
            overrides: values that replace those of the file.

        Raises:
            IdentifierError, ConfigError: on every rank, for an unknown name, a folder without
                config.json, or unknown keys.
        """
        path = pathlib.Path(resolve(str(pretrained_model_name_or_path), "config")) / CONFIG_FILE
        # What only one rank cannot read, or asks for, is an error of all: the others would wait for
        # its weights.
        return attempt(lambda: cls.from_json_file(path, **overrides), everyone(), ConfigError)

    @classmethod
    def from_json_file(
        cls: type[Self], json_file: str | os.PathLike[str], **overrides: Any
    ) -> Self:
        """The configuration in `json_file`, with `overrides`; not collective.

        Raises:
            ConfigError: for a file that is missing, no JSON object, or has unknown keys.
        """
        content = read_json(pathlib.Path(json_file))
        try:
            return cls.from_dict(content, **overrides)
        except ConfigError as error:
            raise ConfigError(f"{json_file}: {error}") from error

    @classmethod
    def from_dict(cls: type[Self], content: Mapping[str, Any], **overrides: Any) -> Self:
        """A configuration with the values of `content`, in which `overrides` replace others.

        They are read as Hugging Face's if there is a `model_type` among them.

        Raises:
            ConfigError: for unknown keys, or values of another kind of model.
        """
        if "model_type" in content:
            content = cls._from_hugging_face_config(content)
        if "half" in overrides:  # it names a dtype, in place of that of the file
            content = {name: value for name, value in content.items() if name != "dtype"}
        return cls(**cls.checked({**content, **overrides}))

    @classmethod
    def _from_hugging_face_config(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        kind, known = content["model_type"], (cls.model_type, *cls.other_types)
        if cls.model_type and kind not in known:
            raise ConfigError(
                f"model_type is {kind!r}: {cls.__name__} takes {' or '.join(map(repr, known))}."
            )
        own = {field.name for field in dataclasses.fields(cls)}
        special = {
            name: content[name]
            for name in SPECIAL_IDS
            if name not in own and content.get(name) is not None
        }
        try:
            return {
                **cls.from_hugging_face(content),
                "special_ids": special or None,
                # but for the name of a file of weights: what is saved has others
                "hugging_face": {k: v for k, v in content.items() if k != "transformers_weights"},
            }
        except KeyError as error:
            raise ConfigError(
                f"the Hugging Face configuration of type {kind!r} lacks {error}."
            ) from error

    @classmethod
    def from_hugging_face(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Our values for those of a Hugging Face config.json, given as `content`.

        Raises:
            ConfigError: for values of a model that is another in substance.
        """
        if not cls.HUGGING_FACE_NAMES:
            raise ConfigError(
                f"{cls.__name__} cannot be read from a Hugging Face configuration of type "
                f"{content.get('model_type')!r}."
            )
        return {
            ours: content[there] if isinstance(there, str) else content.get(*there)
            for ours, there in cls.HUGGING_FACE_NAMES.items()
        }

    def to_hugging_face(self) -> dict[str, Any]:
        """The content of a Hugging Face config.json for this model.

        Raises:
            ConfigError: for values that transformers' model cannot have.
        """
        if not self.HUGGING_FACE_NAMES:
            raise ConfigError(
                f"{type(self).__name__} has no counterpart in Hugging Face: save it with "
                "format='model_center'."
            )
        values = {
            there if isinstance(there, str) else there[0]: getattr(self, ours)
            for ours, there in self.HUGGING_FACE_NAMES.items()
        }
        return values | {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }

    def hugging_face_content(self, tokenizer: Any = None) -> dict[str, Any]:
        """`to_hugging_face` with special tokens' ids, the configuration's or the tokenizer's.

        Of a configuration that was read from a file of Hugging Face, this is the file's content
        with what has changed since.
        """
        content, special = self.to_hugging_face(), self.special_ids
        if special is None and tokenizer is not None:
            ids = {
                name: getattr(tokenizer, name, None) for name in SPECIAL_IDS if name not in content
            }
            special = {name: value for name, value in ids.items() if value is not None}
        content |= special or {}
        return (
            content if self.hugging_face is None else self._with_changes(self.hugging_face, content)
        )

    def _with_changes(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """The file's content `before` with those values of `now` that it does not say."""
        now = {name: value for name, value in now.items() if name != "torch_dtype"}
        values_before = self._values_in(before)
        new = {
            name: value
            for name, value in now.items()
            if name not in values_before or values_before[name] != value
        }
        content = {**before, **new}
        # What has changed may stand there under another name too, which would be read first.
        for name in (None, *(name for name in before if name not in now)):
            rest = {key: value for key, value in content.items() if key != name}
            if self._values_in(rest) == now:
                return rest
        lost = sorted(before.keys() - now.keys())
        warn(
            "config.json is written anew, since its first content cannot say what has changed; "
            f"left out: {', '.join(lost)}."
        )
        return now

    def _values_in(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """All values of a Hugging Face configuration; none of one that cannot be read alone."""
        try:
            values = type(self).from_dict(content, hugging_face=None).hugging_face_content()
        except ConfigError:
            return {}
        return {name: value for name, value in values.items() if name != "torch_dtype"}

    def refuse_unless(self, **expected: Any) -> None:
        """Refuse to be written for Hugging Face with values that the model there cannot have.

        Raises:
            ConfigError: naming the values that are not as expected.
        """
        others = [
            f"{name} is {getattr(self, name)!r}, there it is {value!r}"
            for name, value in expected.items()
            if getattr(self, name) != value
        ]
        if others:
            raise ConfigError(
                f"Hugging Face's {self.model_type} cannot have this configuration: "
                f"{'; '.join(others)}. Save the model with format='model_center'."
            )

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values, if all of them are keys of this configuration.

        Raises:
            ConfigError: naming those that are not, with the nearest that are.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = [with_nearest(name, known) for name in values if name not in known]
        if unknown:
            raise ConfigError(f"{cls.__name__} does not know {', '.join(unknown)}.")
        return dict(values)

    def to_dict(self) -> dict[str, Any]:
        """All values by name, in JSON's types; the dtype as `half`, or where needed by name."""
        out = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in (*OF_THE_RUN, *OF_THE_FILE)
        }
        out["half"] = self.half
        if self.dtype == torch.bfloat16:
            out["dtype"] = "bfloat16"
        if self.special_ids is None:  # which ModelCenter does not know
            del out["special_ids"]
        return {
            name: str(value) if isinstance(value, float) and math.isinf(value) else value
            for name, value in out.items()
        }

    def to_json_string(self) -> str:
        """`to_dict` as JSON, with sorted keys."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def to_json_file(self, json_file_path: str | os.PathLike[str]) -> None:
        """Write `to_json_string` to `json_file_path`, on every rank that calls it."""
        pathlib.Path(json_file_path).write_text(self.to_json_string(), encoding="utf-8")


@dataclasses.dataclass(kw_only=True)
class TransformerConfig(Config):
    """The fields of every transformer's configuration.

    Attributes:
        vocab_size: rows of the embedding.
        dim_model: width of the hidden states.
        num_heads: heads of each attention.
        dim_head: width of each head.
        dim_ff: inner width of the feed-forward networks.
        dropout_p: probability of dropout, after the embedding, after each part of a layer, and of
            attention probabilities.
        emb_init_mean: mean of the first values of the embedding.
        emb_init_std: their standard deviation.
        pos_bias_type: "none", "relative" or "rotary"; each model has one, another is an error.
        norm_init_var: first value of the norms' weights.
        norm_bias: whether norms are layer norms, with a bias, or RMS norms.
        norm_eps: eps of the norms.
        att_init_mean: mean of the first weights of attention.
        att_init_std: their standard deviation.
        att_bias: whether the linear maps of attention have a bias.
        att_mask_value: accepted; hidden keys always have the weight 0.
        ffn_init_mean: mean of the first weights of the feed-forward networks.
        ffn_init_std: their standard deviation.
        ffn_bias: whether their linear maps have a bias.
        ffn_activate_fn: relu, gelu, gelu_new or silu, or `gated_` and one of them.
        proj_init_mean: mean of the first weights of an output head of its own.
        proj_init_std: their standard deviation.
        proj_bias: whether it has a bias.
        length_scale: divide products of linear maps and embeddings by the square root of their
            length.
        attn_scale: divide attention scores by sqrt(dim_head).
        tied: whether the head is the embedding.
        cls_head: number of classes of a classification head instead of the language model's; None
            for none.
        post_layer_norm: norms behind each part; without effect, as in ModelCenter, in models whose
            norms are always before each part.

    Raises:
        ConfigError: naming the value, when a configuration is made.
    """

    # Those of ModelCenter's arguments that not all models have: after `vocab_size`, after
    # `pos_bias_type`, after `tied`, and at the end.
    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = ("", "", "", "")
    # How many of ModelCenter's arguments all versions of it have in the same order; None for all.
    POSITIONS: ClassVar[int | None] = None

    vocab_size: int
    dim_model: int = 768
    num_heads: int = 12
    dim_head: int = 64
    dim_ff: int = 3072
    dropout_p: float = 0.0
    emb_init_mean: float = 0.0
    emb_init_std: float = 0.02
    pos_bias_type: str = "none"
    norm_init_var: float = 1.0
    norm_bias: bool = True
    norm_eps: float = 1e-5
    att_init_mean: float = 0.0
    att_init_std: float = 0.02
    att_bias: bool = True
    att_mask_value: float | str = -float("inf")
    ffn_init_mean: float = 0.0
    ffn_init_std: float = 0.02
    ffn_bias: bool = True
    ffn_activate_fn: str = "gelu"
    proj_init_mean: float = 0.0
    proj_init_std: float = 0.02
    proj_bias: bool = True
    length_scale: bool = False
    attn_scale: bool = True
    tied: bool = True
    cls_head: int | None = None
    post_layer_norm: bool = False

    @classmethod
    def arguments(cls) -> tuple[str, ...]:
        """ModelCenter's arguments, in its order."""
        first, after_positions, after_tied, last = cls.OWN_ARGUMENTS
        fields = {field.name for field in dataclasses.fields(cls)}
        depths = ("num_layers", "num_encoder_layers", "num_decoder_layers")
        depth = " ".join(name for name in depths if name in fields)
        sizes = f"vocab_size {first} dim_model num_heads dim_head dim_ff {depth} dropout_p"
        start = f"{sizes} emb_init_mean emb_init_std pos_bias_type {after_positions} {ARGUMENTS}"
        names = f"{start} tied {after_tied} cls_head post_layer_norm {last}".split()
        # A base class has no depth.
        return tuple(name for name in names if name in fields)[: cls.POSITIONS]

    def __post_init__(self) -> None:
        """As in Config; sizes are checked too."""
        super().__post_init__()
        check_fields(self)
        self.att_mask_value = float(self.att_mask_value)
        if self.pos_bias_type != type(self).pos_bias_type:
            raise ConfigError(
                f"pos_bias_type is {self.pos_bias_type!r}: this model has "
                f"{type(self).pos_bias_type!r}. Leave it out."
            )

    def refuse_unless_classic_layers(self, **expected: Any) -> None:
        """As `refuse_unless`, for heads as wide as the model, norms with a bias, and no gates."""
        self.refuse_unless(
            dim_model=self.num_heads * self.dim_head,
            norm_bias=True,
            length_scale=False,
            ffn_activate_fn=self.ffn_activate_fn.removeprefix(GATED),
            **expected,
        )

    def stack(self, num_layers: int) -> dict[str, Any]:
        """Arguments of an Encoder or Decoder of this configuration that they have in common."""
        same = (
            *("dim_model", "dim_ff", "num_heads", "dim_head", "dtype", "pos_bias_type"),
            *("norm_init_var", "norm_bias", "norm_eps", "length_scale", "attn_scale", "dropout_p"),
            *("att_init_mean", "att_init_std", "att_bias", "att_mask_value"),
            *("ffn_init_mean", "ffn_init_std", "ffn_bias", "ffn_activate_fn"),
        )
        return {"num_layers": num_layers, **{name: getattr(self, name) for name in same}}

    def embedding(self) -> dict[str, Any]:
        """Arguments of an embedding of this configuration beside its sizes."""
        return {
            "length_scale": self.length_scale,
            "dtype": self.dtype,
            "init_mean": self.emb_init_mean,
            "init_std": self.emb_init_std,
        }

    def head(self) -> dict[str, Any]:
        """Arguments of the Linear of an output head of this configuration beside its sizes."""
        return {
            "length_scale": self.length_scale,
            "dtype": self.dtype,
            "init_mean": self.proj_init_mean,
            "init_std": self.proj_init_std,
            "bias": self.proj_bias,
        }


RELATIVE = "position_bias_num_buckets position_bias_max_distance pos_init_mean pos_init_std"


@dataclasses.dataclass(kw_only=True)
class RelativeConfig(TransformerConfig):
    """Configuration of a model with T5's relative positions, and without biases.

    Attributes:
        position_bias_num_buckets, position_bias_max_distance: of the relative positions, see
            `bucket_of`.
        pos_init_mean, pos_init_std: of their first values.
    """

    OWN_ARGUMENTS: ClassVar[tuple[str, str, str, str]] = ("", RELATIVE, "", "")

    pos_bias_type: str = "relative"
    position_bias_num_buckets: int = 32
    position_bias_max_distance: int = 128
    pos_init_mean: float = 0.0
    pos_init_std: float = 1
    norm_bias: bool = False
    norm_eps: float = 1e-6
    att_bias: bool = False
    ffn_bias: bool = False
    proj_bias: bool = False
    attn_scale: bool = False

    def relative(self, *, bidirectional: bool) -> dict[str, Any]:
        """Arguments of a RelativePositionEmbedding of this configuration."""
        return {
            "num_heads": self.num_heads,
            "num_buckets": self.position_bias_num_buckets,
            "max_distance": self.position_bias_max_distance,
            "bidirectional": bidirectional,
            "dtype": self.dtype,
            "init_mean": self.pos_init_mean,
            "init_std": self.pos_init_std,
        }


def dtype_of(dtype: torch.dtype | str | None, half: bool) -> torch.dtype:
    """The dtype that a configuration means.

    Raises:
        ConfigError: for another name.
    """
    if dtype is None:
        return torch.float16 if half else torch.float32
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: expected one of {', '.join(DTYPES)}.")
    return DTYPES[dtype.removeprefix("torch.")]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: if it is not there or holds something else.
    """
    if not path.is_file():
        raise ConfigError(f"there is no {path.name} in {path.parent}.")
    try:
        return read_object(path)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
