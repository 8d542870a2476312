"""Models of model_center on several ranks against the same models, not sharded, in one process:
from one folder, one answer.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models import parity
from tests.ranks import models
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.model.bert import Bert, BertConfig
from model_center.model.cpm3 import CPM3, CPM3Config
from model_center.model.glm import GLM, GLMConfig
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.gptj import GPTj, GPTjConfig
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.longformer import Longformer, LongformerConfig
from model_center.model.t5 import T5, T5Config
from model_center.model.vit import ViT, VitConfig

ROWS, LENGTH, STEPS, VOCAB = 6, 7, 3, 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim_model": 22,
    "num_heads": 3,
    "dim_head": 6,
    "dim_ff": 29,
    "half": False,
}
# what Hugging Face's GPT-2, GPT-J and BERT can be
SQUARE = SIZES | {"dim_head": 7, "dim_model": 21}
CONFIGS = {
    "gpt2": GPT2Config(**SQUARE, num_layers=3, position_size=11),
    "bert": BertConfig(**SQUARE, num_layers=2, position_size=11),
    "t5": T5Config(**SIZES, num_encoder_layers=2, num_decoder_layers=2, scale_logits=True),
    "gptj": GPTjConfig(**SQUARE | {"num_heads": 3}, num_layers=2, pos_rotary_dim=4),
    "llama": LlamaConfig(**SIZES, num_layers=2, num_heads_kv=1),
    "cpm3": CPM3Config(
        **SIZES,
        num_layers=2,
        prompt_types=2,
        prompt_length=2,
        segment_types=3,
        position_bias_num_buckets=8,
    ),
    "longformer": LongformerConfig(
        **SQUARE, num_layers=2, position_size=11, attention_window=2, dropout_p=0.0
    ),
    "glm": GLMConfig(
        **SIZES,
        num_layers=2,
        position_size=11,
        dropout_p=0.0,
        sop_tok_id=VOCAB - 1,
        mask_tok_id=VOCAB - 2,
    ),
    "vit": VitConfig(
        img_size=6,
        patch_size=2,
        num_classes=VOCAB,
        hidden_size=21,
        num_heads=3,
        mlp_size=29,
        num_layers=2,
        half=False,
    ),
}
CLASSES: dict[str, Any] = {
    "gpt2": GPT2,
    "bert": Bert,
    "t5": T5,
    "gptj": GPTj,
    "llama": Llama,
    "cpm3": CPM3,
    "longformer": Longformer,
    "glm": GLM,
    "vit": ViT,
}
# ZeRO level, recomputation, optimizer
MODES = [(2, False, "offload"), (2, True, "sgd"), (3, True, "adam")]
OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sgd": (functools.partial(torch.optim.SGD, lr=0.1),) * 2,
    # eps is large beside the noise in gradients that should be 0, those of the bias of keys
    "adam": (
        functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
        functools.partial(bmt.optim.AdamOptimizer, lr=0.01, eps=1e-3, weight_decay=0.1),
    ),
    "offload": (
        functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
        functools.partial(bmt.optim.AdamOffloadOptimizer, lr=0.01, eps=1e-3, weight_decay=0.1),
    ),
}


def way_out(name):
    """The format in which a model is saved: Hugging Face has no CPM, no GLM of this kind, and one
    norm where GPT-J has two.
    """
    return "model_center" if name.startswith(("cpm", "glm", "gptj")) else "hf"


def batch(name, step):
    """Ids, padding at the end of some rows, and for encoder-decoders two sequences."""
    ids = parity.token_ids(ROWS, LENGTH, high=VOCAB - 2 * (name == "glm"), low=0, seed=step)
    if name == "vit":
        pixels = torch.randn(
            ROWS, 3, 6, 6, generator=torch.Generator("cpu").manual_seed(step), device="cpu"
        )
        return {"input_seq": pixels.to(torch.get_default_device())}
    if name == "glm":
        ids[:, 1], ids[:, 4] = VOCAB - 2, VOCAB - 1
    if name == "cpm3":
        ids[:, :2] = torch.tensor([2, 3])
        return {"input_ids": ids, "token_type_ids": ids % 3, "context": ids % 2}
    length = torch.tensor([LENGTH, 5] * (ROWS // 2))
    inputs = {"input_ids": ids, "attention_mask": torch.arange(LENGTH) < length[:, None]}
    if name == "longformer":  # only the first rank has a global token
        return inputs | {
            "global_attention_mask": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) == 2
        }
    return inputs | ({"decoder_input_ids": ids.flip(1)} if name == "t5" else {})


def answer(model, inputs):
    """Logits of all tokens, and a loss in which every parameter has a part."""
    asked = {Bert: {"output_pooler_output": True}, Longformer: {"output_logits": True}}
    out = model(**inputs, **asked.get(type(model), {}))
    logits = parity.logits_of(out)
    if "input_seq" in inputs:
        return logits, logits.logsumexp(1).mean() - logits[:, 0].mean()
    loss = F.cross_entropy(logits.flatten(0, 1), inputs["input_ids"].flatten())
    if type(model) in asked:
        loss = loss + out.pooler_output.square().mean()
    return logits, loss


def train(name, folder, level, recompute, optimizer):
    """Load, save, and train some steps, on all ranks or in this process; what there is to
    compare.
    """
    model = CLASSES[name].from_pretrained(
        folder, dtype="float32", zero_level=level, use_checkpoint=recompute
    )
    saved = folder.parent / f"{'ranks' if bmt.is_initialized() else 'plain'}-{level}-{recompute}"
    model.save_pretrained(saved, format=way_out(name))
    sharded = bmt.is_initialized()
    assert (
        any(isinstance(param, bmt.DistributedParameter) for param in model.parameters()) == sharded
    )
    stepper = OPTIMIZERS[optimizer][sharded](model.parameters())
    manager = bmt.optim.OptimManager() if sharded else None
    if manager is not None:
        manager.add_optimizer(stepper)
    result: dict[str, Any] = {
        "saved": saved,
        "start": {key: value.clone() for key, value in model.state_dict().items()},
    }
    for step in range(STEPS):
        stepper.zero_grad()
        inputs = {key: models.own(value) for key, value in batch(name, step).items()}
        logits, loss = answer(model, inputs)
        loss.backward() if manager is None else manager.backward(loss)
        if step == 0:
            result |= {"logits": logits.detach(), "loss": loss.detach()}
            # in a process group those of this rank's slices
            result["gradients"] = models.plain_gradients(model)
        stepper.step() if manager is None else manager.step()
    result["state"] = model.state_dict()
    return result


def written(folder, name):
    """The file with the weights."""
    return (
        folder / ("pytorch_model.pt" if way_out(name) == "model_center" else "model.safetensors")
    ).read_bytes()


def train_in_all_modes(name, folder):
    return [train(name, folder, *mode) for mode in MODES]


def compare(ranks, plain, name, what):
    """What the ranks have together, and each of them of the whole model, is what one process
    has.
    """
    models.assert_same(
        torch.cat([rank["logits"] for rank in ranks]), plain["logits"], f"{what}: logits"
    )
    models.assert_same(
        torch.stack([rank["loss"] for rank in ranks]).mean(), plain["loss"], f"{what}: loss"
    )
    for key, grad in plain["gradients"].items():
        slices = torch.cat([rank["gradients"][key].flatten() for rank in ranks])
        parity.assert_close(slices.view_as(grad), grad, f"{what}: gradient of {key}")
    for rank in ranks:
        assert (
            rank["gradients"].keys() == plain["gradients"].keys()
            and rank["state"].keys() == plain["state"].keys()
        )
        for key, value in plain["state"].items():
            is_trained = not torch.equal(value, plain["start"][key])
            assert is_trained or key.endswith(("project_k.bias", "project_k_global.bias")), (
                f"{what}: {key} was not trained"
            )
            parity.assert_close(rank["state"][key], value, f"{what}: {key} after {STEPS} steps")
    assert written(ranks[0]["saved"], name) == written(plain["saved"], name), (
        f"{what}: not the same file"
    )


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("gpt2", 3),
        ("t5", 2),
        *(
            pytest.param(name, 2 + (name in ("bert", "llama")), marks=pytest.mark.long)
            for name in CLASSES
            if name not in ("gpt2", "t5")
        ),
    ],
)
def test_training(name, world_size, tmp_path):
    """Scores, loss, gradients, parameters after some steps of an optimizer, and what is saved, in
    every mode.
    """
    folder = tmp_path / "start"
    parity.randomized(CLASSES[name](CONFIGS[name]), 0.15).save_pretrained(
        folder, format=way_out(name)
    )
    ranks = run_ranks(train_in_all_modes, world_size, name, folder)
    for place, mode in enumerate(MODES):
        what = f"{name}, ZeRO-{mode[0]}, recompute={mode[1]}, {mode[2]}, {world_size} ranks"
        compare([rank[place] for rank in ranks], train(name, folder, *mode), name, what)
