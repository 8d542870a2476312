"""Causal models that transformers has and this package has not: learnt, kept, adapted, gone on with,
as transformers computes them.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.models.parity import values
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import command, losses, on, same_learning
from tests.training.their_models import HEADS, arguments, check_learning, make, tiny_config

from bmtrain.errors import ParameterError
from model_center.errors import ConfigError
from model_center.training.objectives import Objective
from model_center.training.setup import DTYPES
from model_center.training.trained_model import TransformersModel, layers_to_adapt, trained_model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6")
# Whether samples share rows.
FEW = {"gemma2": True, "cohere": True, "gpt_oss": True, "qwen3_moe": True, "mamba": False}
SHARED = """
apertus arcee aria_text biogpt bitnet cohere2 cohere2_moe cwm deepseek_v3 doge ernie4_5
ernie4_5_moe exaone4 exaone_moe falcon flex_olmo gemma gemma3_text glm glm4 glm4_moe
gpt_bigcode gpt_neox gpt_neox_japanese granite granitemoe granitemoeshared helium jetmoe
lfm2 llama4_text ministral3 mixtral nanochat olmo olmo2 olmo3 olmoe persimmon phi phi3
qwen2_moe seed_oss smollm3 stablelm starcoder2 vaultgemma xglm
"""
MANY = {
    **dict.fromkeys(SHARED.split(), True),
    **dict.fromkeys(
        ["bart", "bloom", "falcon_mamba", "minimax", "olmo_hybrid", "qwen3_next"], False
    ),
}
NO_LANGUAGE_MODELS = ["electra", "cpmant", "xlm-roberta"]


def all_learn(folders):
    """On a rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of transformers' own
        return {kind: check_learning(Path(path)) for kind, path in folders.items()}


@pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"]
)
# transformers leaves a thread behind
@pytest.mark.fresh
def test_packed_and_padded_rows(kinds, tmp_path):
    """Loss and gradients, against each sample alone in one process."""
    folders = {kind: str(make(kind, tmp_path)) for kind in kinds}
    for found in run_ranks(all_learn, 2, folders, timeout=500):
        assert found == kinds


# Changes of the default configuration without which it cannot be made small, and whether samples share rows.
EXPERTS = "num_experts_per_tok=2 first_k_dense_replace=1"
SIZED = {
    "bamba": ("mamba_expand=1 attn_layer_indices=[1]", False),
    "deepseek_v2": (EXPERTS, True),
    "dots1": (f"{EXPERTS} n_routed_experts=4 n_shared_experts=1", True),
    "falcon_h1": ("mamba_d_ssm=16 mamba_n_heads=2 mamba_d_head=8", False),
    "granitemoehybrid": (
        "mamba_expand=1 num_hidden_layers=2 layer_types=['mamba','attention'] "
        "num_local_experts=4 num_experts_per_tok=2",
        False,
    ),
    "hunyuan_v1_dense": ("head_dim=8", True),
    "hunyuan_v1_moe": ("head_dim=8 num_experts=4 moe_topk=2", True),
    "lfm2_moe": (
        "num_hidden_layers=2 layer_types=['conv','full_attention'] num_dense_layers=1",
        False,
    ),
    "nemotron": ("num_key_value_heads=2 head_dim=8", True),
    "phimoe": ("router_jitter_noise=0.0 input_jitter_noise=0.0", True),
}


@pytest.mark.long
@pytest.mark.fresh
def test_packed_and_padded_rows_of_sized_models(tmp_path):
    """As above. Falcon-H1 mixes 2 % of a sample into the next here, as little as bf16 rounds."""
    folders = {
        kind: str(make(kind, tmp_path, **values(words))) for kind, (words, _) in SIZED.items()
    }
    for found in run_ranks(all_learn, 2, folders, timeout=300):
        assert found == {kind: shares for kind, (_, shares) in SIZED.items()}


def refused(folders):
    for path in folders:
        trained_model = trained_model_of(path)
        with pytest.raises(ConfigError, match="its tokens attend to later ones"):
            trained_model.load(arguments(Path(path)))


@pytest.mark.long
@pytest.mark.fresh
def test_models_that_are_no_language_models(tmp_path):
    run_ranks(refused, 1, [str(make(kind, tmp_path)) for kind in NO_LANGUAGE_MODELS])


def rows_of_different_lengths(longrope, dynamic):
    """On a rank: what is refused, and the loss of what is not, beside transformers' own."""
    path = Path(longrope)
    trained_model: Any = trained_model_of(longrope)
    mixed = np.array([16, 48])
    for more in ({"batch_size": 2}, {"batch_size": 1, "objective": Objective.DPO}):
        args = arguments(path, **more)
        trained_model.load(args)
        for lengths in (mixed[:1], mixed[1:]):  # one kind of frequencies
            trained_model.take_lengths(lengths, args)
        with pytest.raises(
            ConfigError, match=r"beyond 32 tokens .* \(longrope\) .* Give --max-len"
        ):
            trained_model.take_lengths(mixed, args)
        assert trained_model.is_packed
    for more, is_packed in (({"max_length": 32}, True), ({"batch_size": 1}, False)):
        args = arguments(path, **more)
        trained_model.load(args)
        trained_model.take_lengths(mixed, args)
        assert trained_model.is_packed == is_packed
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    short, long = torch.arange(5, 21), torch.arange(5, 53)
    alone = {}
    for ids in (short, long, short):
        batch = {"input_ids": ids[None], "targets": (ids + 1)[None]}
        batch["segments"] = torch.ones_like(batch["input_ids"])
        logits = plain(input_ids=ids[None], use_cache=False).logits[0]
        want = F.cross_entropy(logits, ids + 1, reduction="sum")
        assert torch.allclose(trained_model.loss_sum(batch), want, rtol=1e-5)
        alone[len(ids)] = logits[: len(short)]
    assert not torch.allclose(alone[len(short)], alone[len(long)], rtol=1e-2)  # it does matter
    trained_model = trained_model_of(dynamic)
    with pytest.raises(
        ConfigError, match=r"beyond 32 tokens .* \(dynamic\) .* Give --max-length 32\.$"
    ):
        trained_model.load(arguments(Path(dynamic), batch_size=1))
    trained_model.load(arguments(Path(dynamic), max_length=32))
    assert trained_model.is_packed


@pytest.mark.fresh
def test_rotary_frequencies_of_the_longest_row(tmp_path):
    """Rows beside which others are computed otherwise are alone in their micro-batches."""
    scaling: Any = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    ours: dict[str, Any] = {**HEADS, "original_max_position_embeddings": 32, "pad_token_id": 0}
    longrope = make("phi3", tmp_path, max_position_embeddings=64, rope_scaling=scaling, **ours)
    scaling = {"rope_type": "dynamic", "factor": 4.0}
    dynamic = make("olmo2", tmp_path, max_position_embeddings=32, rope_scaling=scaling, **HEADS)
    run_ranks(rows_of_different_lengths, 2, str(longrope), str(dynamic))


def writes_weights(path):
    trained_model = trained_model_of(path)
    trained_model.load(arguments(Path(path)))
    ids = torch.arange(5, 21)[None]
    trained_model.model.eval()
    before = trained_model.logits(ids)
    with pytest.raises(ParameterError, match="the forward pass gave parameter"):
        trained_model.model.train()(input_ids=ids, use_cache=False)
    assert torch.equal(trained_model.model.eval()(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.long
@pytest.mark.fresh
def test_a_model_that_writes_weights_in_its_forward_pass(tmp_path):
    """Gemma 3n clamps some while it trains: refused, and computed as before."""
    small: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_shared_layers": 0}
    small |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    small |= {"activation_sparsity_pattern": [0.0] * 2, "vocab_size_per_layer_input": 1000}
    path = make("gemma3n_text", tmp_path, laurel_rank=8, **small)
    run_ranks(writes_weights, 2, str(path))


def positions(folders):
    found = []
    for path in folders:
        subject = trained_model_of(path)
        subject.load(arguments(Path(path), max_length=48))
        found.append(subject.num_positions)
    return found


@pytest.mark.long
@pytest.mark.fresh
def test_tables_of_positions(tmp_path):
    """Longer rows are refused where transformers would read behind the table."""
    folders = [str(make(kind, tmp_path)) for kind in ("gpt_neo", "biogpt", "gpt_bigcode", "gemma")]
    assert run_ranks(positions, 1, folders) == [[64, 64, 64, None]]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "dtype"), [("qwen3_moe", "fp32"), ("gemma3_text", "bf16")])
def test_a_run_of_one(kind, dtype, tmp_path):
    """All weights and adapters, also beside 4 bits; a run goes on bit by bit, and what comes out is
    read by transformers, by peft and by `generate`.
    """
    path = make(kind, tmp_path, DTYPES[dtype])
    words = [*on(path), "--dtype", dtype, "--batch-size 2"]
    command(*words, "--train-iters 4 --epochs 2 --save", tmp_path / "whole")
    command(*words, "--train-iters 2 --epochs 2 --save", tmp_path / "parts")
    command(*words, "--train-iters 4 --epochs 2 --resume --save", tmp_path / "parts")
    same_learning(tmp_path / "parts", tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    whole, parts = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").state_dict()
        for name in ("whole", "parts")
    )
    before: Any = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert any(
        not torch.equal(value, before[name].to(value.dtype)) for name, value in whole.items()
    )
    command(*words, "--lora-rank 4 --train-iters 2 --epochs 2 --save", tmp_path / "lora")
    command(*words, "--lora-rank 4 --load-in-4bit --train-iters 1 --save", tmp_path / "4bit")
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "lora" / "adapter"))
    moved = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert moved and all(p.abs().max() > 0 for p in moved)
    ids = torch.arange(5, 12)[None]
    how: Any = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    models: list[Any] = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        adapted.float(),
    ]
    expected = [
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)[0, 7:].tolist()
        for model in models
    ]
    found = run_ranks(answers, 2, str(path), str(tmp_path / "lora" / "adapter"), ids)
    assert [list(one) for one in found] == [expected] * 2
    assert json.loads((tmp_path / "4bit" / "adapter" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(path)


def adapters_are_computed(folders):
    """On a rank: scores beside adapters are those of transformers' model with A and B in its weights."""
    ids = torch.arange(5, 21)[None]
    for path, wrong, why in folders:
        trained_model: Any = TransformersModel(path)
        trained_model.load(arguments(Path(path)))
        with pytest.raises(ConfigError, match=why):
            trained_model.adapt(arguments(Path(path), lora_rank=4, lora_targets=[wrong]))
        for targets in (None, ["all-linear"]):
            args = arguments(Path(path), lora_rank=4, lora_alpha=8, lora_targets=targets)
            trained_model = TransformersModel(path)
            trained_model.load(args)
            trained_model.adapt(args)
            plain: Any = transformers.AutoModelForCausalLM.from_pretrained(path)
            before = plain(input_ids=ids, use_cache=False).logits
            for name, param in trained_model.model.named_parameters():
                if ".lora_B." in name:
                    torch.nn.init.normal_(param, std=0.1)
                    a = trained_model.model.get_parameter(name.replace(".lora_B.", ".lora_A."))
                    layer = plain.get_submodule(name.partition(".lora_")[0].split(".model.", 1)[1])
                    layer.weight.data += 2 * param.detach() @ a.detach()
            found = trained_model.logits(ids)
            want = plain(input_ids=ids, use_cache=False).logits
            assert (want - before).abs().max() > 0.01, path
            assert torch.allclose(found, want, rtol=1e-3, atol=1e-4), path


@pytest.mark.fresh
def test_layers_outside_of_blocks_get_adapters(tmp_path):
    """OPT's projections from and to its embeddings are in no list of layers; its head gets none.
    Falcon's layers are of a class of its own. BERT's `dense` are not all of its attention.
    """
    bert = transformers.AutoModelForCausalLM.from_config(tiny_config("bert", is_decoder=True))
    assert {"query", "key", "value"} < {*layers_to_adapt(bert, None)["target_modules"]}
    path = str(make("opt", tmp_path, word_embed_proj_dim=8))
    falcon = str(make("falcon", tmp_path)), "nowhere", "nowhere"
    run_ranks(adapters_are_computed, 1, [(path, "lm_head", "lm_head is the head"), falcon])
    run_ranks(all_but_the_head, 1, path)


def all_but_the_head(path):
    trained_model = TransformersModel(path)
    trained_model.load(arguments(Path(path)))
    trained_model.adapt(arguments(Path(path), lora_rank=4, lora_targets=["all-linear"]))
    plain = transformers.AutoModelForCausalLM.from_pretrained(path)
    linear = {name for name, one in plain.named_modules() if isinstance(one, torch.nn.Linear)}
    names = [name for name, _ in trained_model.model.named_modules() if name.endswith(".lora_B")]
    found = {name.removeprefix("base_model.model.").removesuffix(".lora_B") for name in names}
    assert found == linear - {"lm_head"} and "model.decoder.project_in" in found


@pytest.mark.long
@pytest.mark.fresh
def test_layers_that_are_not_called_get_no_adapters(tmp_path):
    """Mamba's kernels read weights themselves; Llama 4's router is a linear layer that returns two."""
    cases = [
        ("falcon_mamba", "dt_proj", "dt_proj is not called: FalconMambaMixer reads its weight"),
        ("mamba", "out_proj", "out_proj is not called: MambaMixer reads its weight"),
        ("jamba", "dt_proj", "dt_proj is not called: JambaMambaMixer reads its weight"),
        ("llama4_text", "router", "router is a Llama4Router"),
        ("olmo2", "nowhere", "nowhere"),
    ]
    run_ranks(adapters_are_computed, 1, [(str(make(kind, tmp_path)), *how) for kind, *how in cases])


def test_adapters_beside_the_experts(tmp_path):
    """The short part of the above: a run by LoRA, whose files peft reads."""
    path = make("qwen3_moe", tmp_path)
    command(*on(path), "--lora-rank 4 --train-iters 2 --batch-size 2 --save", tmp_path / "run")
    base = transformers.AutoModelForCausalLM.from_pretrained(path)
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path / "run" / "adapter"))
    assert all(p.abs().max() > 0 for name, p in adapted.named_parameters() if "lora_B" in name)


def answers(path, adapter, ids):
    """On a rank: what the model says, alone and with an adapter."""
    trained_model: Any = trained_model_of(path)
    trained_model.load(arguments(Path(path)))
    plain = trained_model.answer(ids, 5)
    trained_model.add_adapters(Path(adapter))
    return plain, trained_model.answer(ids, 5)
