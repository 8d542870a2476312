"""Does `bmt.load` read what transformers writes, for all of its architectures?

    python benchmarks/load_architectures.py [MODEL_TYPE ...]

For each architecture a small model is made from its default configuration with smaller sizes,
saved by transformers, loaded into a sharded model on this process, and compared, tensor by tensor,
with what transformers itself loads. One line of JSON for each; the exit code is 1 if any differs.
Architectures that cannot be made so small, or that transformers itself does not load again, say so.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import sys
import tempfile
from typing import Any

import torch
import transformers as hf
from machine import machine
from transformers.models.auto import modeling_auto

import bmtrain as bmt
from model_center.weights import load_transformers

LARGEST = 60_000_000  # parameters
VOCABULARY = 67
# An attribute of this name, or with this last part of it, becomes at most so large.
SIZES = {
    VOCABULARY: "vocab_size",
    40: "max_position_embeddings n_positions max_source_positions max_target_positions",
    32: "image_size",
    24: "intermediate_size ffn_dim d_ff n_inner d_inner",
    16: "hidden_size hidden_dim d_model n_embd embed_dim embedding_size projection_dim",
    8: "head_dim patch_size moe_intermediate_size kv_lora_rank q_lora_rank v_head_dim",
    5: "num_queries",
    4: "num_experts num_local_experts n_routed_experts qk_rope_head_dim qk_nope_head_dim",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth "
    "num_key_value_heads num_attention_heads num_heads n_head n_heads attention_heads window_size",
}
LIMITS = [(name, size) for size, names in SIZES.items() for name in names.split()]
PER_LAYER = ("layer_types", "mlp_layer_types")
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
)


def classes() -> dict[str, str]:
    """The name of the class with the most of each model type: with its head, where there is one."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for kind, name in mapping.items():
            found.setdefault(kind, name if isinstance(name, str) else name[0])
    return dict(sorted(found.items()))


def shrink(config: Any) -> Any:
    """The configuration, and those in it, with smaller sizes."""
    for key, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            shrink(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(config, key, _smaller(key, value))
    for key in PER_LAYER:
        kinds = vars(config).get(key)
        if isinstance(kinds, list):
            number = vars(config).get("num_hidden_layers", 2)
            setattr(config, key, (list(dict.fromkeys(kinds)) * number)[:number])
    return config


def _smaller(key: str, value: int) -> int:
    if key.endswith(("_token_id", "_token_index", "_token")):
        return min(value, 3)
    for name, limit in LIMITS:
        if key == name or key.endswith("_" + name):
            return min(value, limit)
    return value


def verdict(name: str) -> str:
    """ "equal", or what is the matter."""
    try:
        kind = getattr(hf, name)
        config = shrink(kind.config_class())
        with torch.device("meta"):
            size = sum(param.numel() for param in kind(copy.deepcopy(config)).parameters())
        if size > LARGEST:
            return f"not made: {size:,} parameters"
        model = kind(copy.deepcopy(config))
    except Exception as error:  # configurations of others ask for what a general one cannot know
        return f"not made: {error!r:.150}"
    fill(model)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.save_pretrained(folder)
            want = kind.from_pretrained(folder).state_dict()
        except Exception as error:
            return f"not loaded by transformers: {error!r:.150}"
        written = model.state_dict()
        if any(n not in written or not torch.equal(written[n], x) for n, x in want.items()):
            return "not loaded by transformers: its own values are others"
        ours = kind(copy.deepcopy(config))
        wrapped = bmt.BMTrainModelWrapper(ours)
        try:
            load_transformers(wrapped, folder)
        except Exception as error:
            return f"refused: {error}"
    found = wrapped.state_dict()
    wrong = [n for n, x in want.items() if n not in found or not torch.equal(found[n], x)]
    return f"differs: {', '.join(wrong)}" if wrong else "equal"


def fill(model: torch.nn.Module) -> None:
    """Every element has a value of its own."""
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.copy_(torch.randn(param.shape))


def main() -> int:
    """Go through the model types that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--commit", default="unknown", help="of this tree, for the last line")
    given = parser.parse_args()
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    bmt.init_distributed()
    counts: collections.Counter[str] = collections.Counter()
    for kind, name in classes().items():
        if not given.types or kind in given.types:
            found = verdict(name)
            counts[found.partition(":")[0]] += 1
            print(json.dumps({"type": kind, "class": name, "result": found}), flush=True)
    made_on = machine("cpu") | {"transformers": hf.__version__, "commit": given.commit}
    print(json.dumps({"counts": dict(counts), "machine": made_on}))
    return int(bool(counts["differs"] or counts["refused"]))


if __name__ == "__main__":
    sys.exit(main())
