"""What random programs are made of: options with their choices, drawn from a seed."""

import dataclasses
import random
from typing import Any

# The first choice of each option is its plainest, which shrinking goes back to.
OPTIONS = {
    "dtype": ("float32", "float32", "float32", "bfloat16", "float64"),
    "rows": ("split", "split", "same"),
    "wrap": ("wrapper", "blocks", "blocks_only", "nested", "distributed", "manual_outer"),
    "level": (3, 2),
    "recompute": (False, True, True, "auto"),
    "embedding": ("plain", "plain", "padding_idx", "none", "sparse", "max_norm"),
    "tie": ("none", "none", "head", "objects", "module"),
    "positions": ("none", "none", "none", "row_by_row", "where", "gated"),
    "freeze": ("none", "none", "before", "after", "mid", "attribute"),
    "order": ("forward", "forward", "reversed", "repeated", "skipped", "changing"),
    "micro": (1, 1, 2),
    "deferred": (False, False, True),
    "manager": (True, True, False),
    "hooks": ("none", "none", "module_forward", "module_backward", "parameter", "accumulated"),
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
        "adafactor",
        "muon",
        "lbfgs",
    ),
    "groups": ("one", "one", "named", "dim"),
    "penalty": ("none", "none", "none", "l2", "orthogonal"),
    "clip": ("none", "none", "ours", "ours_inf", "torch"),
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
    "script",
    "sometimes",
    "unused_on_one_rank",
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
    "write_data",
    "average_written",
    "averaged_model",
    "deepcopy_trained",
    "count",
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


def draw(seed, ranks=None):
    """The program of a seed."""
    random_ = random.Random(seed)
    drawn_ranks = random_.choice((1, 2, 2, 2, 3))
    busy = random_.choice((0.3, 0.6, 1.0))
    options = {}
    for name, choices in OPTIONS.items():
        choice, is_special = random_.choice(choices), random_.random() < busy
        options[name] = choice if is_special else choices[0]
    layers = tuple(random_.choice(KINDS) for _ in range(random_.randint(1, 5)))
    between = []
    for _ in range(random_.choice((0, 1, 1, 2, 3))):
        what, step = random_.choice(BETWEEN), random_.randint(1, 2)
        between.append((step, what))
    return Spec(
        seed,
        ranks or drawn_ranks,
        _consistent(options, layers),
        layers,
        tuple(sorted(dict.fromkeys(between))),
    )


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
