"""What random programs are made of: options with their choices, drawn from a seed."""

import dataclasses
import random
from typing import Any

# Features whose choices are not drawn because the engine does not have them yet: take names out to
# turn them on.
OFF = frozenset()

# The first choice of each option is its plainest, which shrinking goes back to. A choice "x@f"
# belongs to the feature f.
OPTIONS = {
    "dtype": ("float32", "float32", "float32", "bfloat16", "float64"),
    "rows": ("split", "split", "same"),
    "wrap": ("wrapper", "blocks", "blocks_only", "nested", "distributed", "manual_outer"),
    "level": (3, 2),
    "recompute": (False, True, True, "auto"),
    "embedding": ("plain", "plain", "padding_idx", "none", "sparse@sparse", "max_norm@max_norm"),
    "tie": ("none", "none", "head", "objects", "module"),
    "positions": ("none", "none", "none", "row_by_row", "where", "gated"),
    "freeze": ("none", "none", "before", "after", "mid", "attribute@freeze_attribute"),
    "order": ("forward", "forward", "reversed", "repeated", "skipped", "changing"),
    "micro": (1, 1, 2),
    "deferred": (False, False, True),
    "manager": (True, True, False),
    "hooks": (
        "none",
        "none",
        "module_forward",
        "module_backward",
        "parameter@parameter_hooks",
        "accumulated@parameter_hooks",
    ),
    "optimizer": (
        "sgd",
        "adam",
        "adam",
        "adamw",
        "adamw_foreach",
        "offload",
        "momentum",
        "rmsprop",
        "nadam",
        "adagrad",
        "adafactor@whole_shapes",
        "muon@whole_shapes",
        "lbfgs@whole_shapes",
    ),
    "groups": ("one", "one", "named", "dim@whole_shapes"),
    "penalty": ("none", "none", "none", "l2@whole_shapes", "orthogonal@whole_shapes"),
    "clip": ("none", "none", "ours", "ours_inf", "torch@torch_clip"),
    "clear": ("none", "zeros", "model", "by_hand", "in_place"),
}
KINDS = (
    "linear",
    "residual",
    "residual",
    "norm",
    "attention",
    "conv",
    "rnn",
    "tiny",
    "buffer",
    "dropout",
    "batchnorm",
    "script@torchscript",
    "sometimes",
    "unused_on_one_rank@ranks_part",
)
BETWEEN = (
    "validate",
    "roundtrip",
    "load_changed",
    "deepcopy",
    "write",
    "edit_gradients",
    "eval_train",
    "average_read",
    "optimizer_roundtrip",
    "print",
    "no_gradient_step",
    "drop_a_gradient",
    "failed_forward",
    "failed_backward",
    "failed_recomputation",
    "abandoned_pass",
    "refused_load",
    "refused_state",
    "refused_gradient",
    "write_data@data_written",
    "average_written@whole_shapes",
    "averaged_model@whole_shapes",
    "deepcopy_trained@whole_shapes",
    "count@whole_shapes",
)
# every name that there is: of a choice, or of choices together, which `draw` looks at
FEATURES = frozenset(
    {
        feature
        for choices in (*OPTIONS.values(), KINDS, BETWEEN)
        for choice in choices
        if isinstance(choice, str) and (feature := choice.partition("@")[2])
    }
    | {"double_clip", "double_adam", "nested_buffers"}
)
# what they do with half of the rows is not half of what they do with all
DRAWING = {"dropout", "buffer"}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A program: its options, its layers, and what happens between its steps."""

    seed: int
    ranks: int
    options: dict[str, Any]
    layers: tuple[str, ...]
    between: tuple[tuple[int, str], ...]

    def __getitem__(self, name):
        return self.options[name]

    def __str__(self):
        special = [
            f"{name}={value}" for name, value in self.options.items() if value != OPTIONS[name][0]
        ]
        between = [f"{what} before step {step}" for step, what in self.between]
        return (
            f"{self.ranks} ranks, layers {'+'.join(self.layers)}; "
            f"{', '.join(special + between) or 'nothing special'}"
        )

    def smaller(self):
        """This program with one thing less, each."""
        out = [
            dataclasses.replace(self, between=self.between[:i] + self.between[i + 1 :])
            for i in range(len(self.between))
        ]
        if len(self.layers) > 1:
            out += [
                dataclasses.replace(self, layers=self.layers[:i] + self.layers[i + 1 :])
                for i in range(len(self.layers))
            ]
        if any(kind != "linear" for kind in self.layers):
            out += [
                dataclasses.replace(
                    self, layers=(*self.layers[:i], "linear", *self.layers[i + 1 :])
                )
                for i, kind in enumerate(self.layers)
                if kind != "linear"
            ]
        for name, value in self.options.items():
            if value != OPTIONS[name][0]:
                out.append(
                    dataclasses.replace(self, options={**self.options, name: OPTIONS[name][0]})
                )
        return [
            dataclasses.replace(spec, options=_consistent(spec.options, spec.layers))
            for spec in out
        ]


def draw(seed, ranks=None, off=OFF):
    """The program of a seed.

    Features that are off draw the plainest choice, and leave the rest of the program as it is.
    """
    random_ = random.Random(seed)
    drawn_ranks = random_.choice((1, 2, 2, 2, 3))
    busy = random_.choice((0.3, 0.6, 1.0))
    options = {}
    for name, choices in OPTIONS.items():
        choice, is_special = random_.choice(choices), random_.random() < busy
        options[name] = _allowed(choice, choices[0], off) if is_special else choices[0]
    if options["dtype"] == "float64":
        options["clip"] = "none" if "double_clip" in off else options["clip"]
        is_ours = options["optimizer"] in ("adam", "offload")
        options["optimizer"] = "adamw" if is_ours and "double_adam" in off else options["optimizer"]
    layers = tuple(
        _allowed(random_.choice(KINDS), "linear", off) for _ in range(random_.randint(1, 5))
    )
    if "nested_buffers" in off and "buffer" in layers and options["wrap"] == "nested":
        options["wrap"] = "blocks"
    between = []
    for _ in range(random_.choice((0, 1, 1, 2, 3))):
        what, step = _allowed(random_.choice(BETWEEN), "validate", off), random_.randint(1, 2)
        between.append((step, what))
    return Spec(
        seed,
        ranks or drawn_ranks,
        _consistent(options, layers),
        layers,
        tuple(sorted(dict.fromkeys(between))),
    )


def _allowed(choice, plain, off):
    if not isinstance(choice, str):
        return choice
    name, _, feature = choice.partition("@")
    return plain if feature in off else name


def _consistent(options, layers):
    """Without what one process could not do either, or does otherwise by its own definition."""
    out = dict(options)
    if DRAWING & set(layers) or out["embedding"] == "max_norm" or out["optimizer"] == "lbfgs":
        out["rows"] = "same"
    # ordinary parameters are reduced by the manager, and only there
    if out["wrap"] == "blocks_only" or out["deferred"]:
        out["manager"] = True
    if out["embedding"] == "none" and out["tie"] == "head":
        out["tie"] = "none"
    if out["embedding"] == "sparse":
        out["optimizer"], out["tie"], out["clip"] = "sgd", "none", "none"
    if out["optimizer"] == "lbfgs":
        # Its steps hang on the last bit of what it computes with.
        out |= {"manager": False, "deferred": False, "micro": 1, "clip": "none", "dtype": "float64"}
    if out["optimizer"] == "adafactor" and set(layers) - {
        "linear",
        "residual",
        "norm",
        "conv",
        "tiny",
        "sometimes",
    }:
        # It divides each step by the mean of all its elements, which the rounding errors of one may
        # decide, that of a key's bias.
        out["optimizer"] = "adagrad"
    if "batchnorm" in layers and out["optimizer"] not in ("sgd", "lbfgs"):
        # The gradient of the bias before it is rounding, of which an optimizer that normalises
        # makes a whole step.
        out["optimizer"] = "momentum"
    if out["micro"] == 1:
        out["deferred"] = False
    if out["dtype"] == "bfloat16" and out["optimizer"] == "offload":
        out["optimizer"] = "adam"
    return out
