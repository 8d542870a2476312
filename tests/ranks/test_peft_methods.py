"""Every tuning method of peft on wrapped models, against plain peft on one process."""

import copy
import dataclasses
import inspect
import itertools
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers as hf
from peft.tuners.lora import layer as lora_layer
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.loraga import preprocess_loraga
from peft.utils import loftq_utils
from tests.ranks import models, test_transformers
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import own_slice

import bmtrain as bmt
from bmtrain.optim import AdamOptimizer, OptimManager

pytestmark = pytest.mark.fresh  # a progress bar leaves a thread

LINEAR = ["q_proj", "v_proj", "down_proj"]
SQUARE = ["q_proj", "o_proj"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How a method is set up, and what it has."""

    config: Callable[[], Any]
    base: str = "layer"  # with one layer; where layers share something, or are numbered: "llama"
    merges: bool = True
    unmerges: bool = True
    draws: bool = False  # random numbers in training mode, other ones on each rank
    mixes: bool = False  # what a row gives depends on the others: all ranks get the same rows
    inputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # one per row
    before: Callable[[Any, Any], None] = lambda base, config: None  # the adapters are put in
    after: Callable[[Any], None] = lambda model: None
    whens: tuple[str, ...] = ("before", "after")  # it was wrapped
    stands_alone: bool = True  # its file is enough on the base as it was
    stepped: Callable[[Any, int], None] = lambda model, step: None  # after a step


def linear(kind, **options):
    targets = options.pop("target_modules", LINEAR)
    # copies: peft changes the lists that it is given
    return lambda: kind(target_modules=list(targets), **copy.deepcopy(options))


def prompt(kind, **options):
    return lambda: kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **options)


def backward_of(model):
    loss = model(**test_transformers.batch(model, 0)).loss
    loss = loss / bmt.world_size() if isinstance(model, bmt.DistributedModule) else loss
    loss.backward()


def lora_ga(base, config):
    preprocess_loraga(base, config, train_step=lambda: backward_of(base))


def eva(model):
    peft.initialize_lora_eva_weights(
        model,
        [test_transformers.batch(model, 0)],
        show_progress_bar=False,
        gather_distributed_inputs=False,
    )


def corda(base, config):
    """Covariances of the inputs of layers, from the same rows on all ranks."""
    from peft.tuners.lora.corda import preprocess_corda

    rows = test_transformers.batch(base, 0)["input_ids"].split(1)

    def run():
        for row in rows:
            base(row)

    preprocess_corda(base, config, run_model=run)


def loftq(base, config):
    """peft names the GPU where it computes: here the CPU."""
    namespace = dict(vars(loftq_utils))
    exec(inspect.getsource(loftq_utils.loftq_init).replace('"cuda"', '"cpu"'), namespace)
    vars(lora_layer)["loftq_init"] = namespace["loftq_init"]


def experts(base, config):
    """Folders of LoRA adapters that the model mixes."""
    for number in range(2):
        torch.manual_seed(20 + number)
        expert = peft.get_peft_model(base_of("uncached"), linear(peft.LoraConfig, r=3)())
        perturb(expert)
        folder = tempfile.mkdtemp()
        expert.save_pretrained(folder)
        config.adapters[str(number)] = folder


TASKS = {"task_ids": torch.arange(test_transformers.ROWS) % 2}


# Name, base, class of the configuration without its ending, and its options.
TABLE = """
lora llama Lora r=3, lora_bias=False
dora llama Lora r=3, use_dora=True
pissa layer Lora r=3, init_lora_weights="pissa"
olora layer Lora r=3, init_lora_weights="olora"
lora_tokens llama Lora r=3, trainable_token_indices={"embed_tokens": [3, 7]}
modules_to_save layer Lora r=3, bias="all", modules_to_save=["lm_head", "norm"]
kasa layer Lora r=3, kasa_config=peft.KasaConfig()
target_weights layer Lora r=2, target_modules=[], target_parameters=["q_proj.weight", "lm_head.weight"]
target_parameters mixtral Lora r=2, target_modules=["q_proj"], target_parameters=EXPERTS
loha layer LoHa r=3
lokr layer LoKr r=3
ia3 layer IA3 feedforward_modules=["down_proj"]
boft layer BOFT boft_block_size=4
oft layer OFT oft_block_size=4, use_cayley_neumann=False
oft_neumann layer OFT oft_block_size=4
hra layer HRA r=4
vera llama Vera r=4, target_modules=SQUARE
fourierft layer FourierFT n_frequency=20
waveft layer WaveFT n_frequency=20
ln_tuning layer LNTuning target_modules=["input_layernorm", "norm"]
trainable_tokens layer TrainableTokens token_indices=[3, 5, 9], target_modules=["embed_tokens"]
adamss layer Adamss r=4, num_subspaces=2, init_weights="orthogonal"
beft llama_bias Beft
c3a layer C3A block_size=8
deft layer Deft r=3
delora layer Delora r=3
frod llama Frod progressbar=False, target_modules=SQUARE
glora layer Glora r=3
gralora layer Gralora r=4, alpha=8
hira layer Hira r=3
miss layer Miss r=4
peanut layer Peanut r=3
psoft layer Psoft r=4, psoft_alpha=4
randlora llama RandLora r=3, randlora_alpha=6
road layer Road group_size=4
shira layer Shira r=3, random_seed=5
supertuning layer Supertuning sparsity=0.9
tinylora llama TinyLora r=2, u=5
unilora llama UniLora r=3, theta_d_length=32
vblora llama VBLoRA r=2, num_vectors=8, vector_length=8
"""
EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def in_table():
    found = {}
    for line in TABLE.strip().splitlines():
        name, base, kind, options = f"{line} ".split(" ", 3)
        config = linear(getattr(peft, f"{kind}Config"), **eval(f"dict({options})"))
        found[name] = Method(base=base, config=config)
    return found


METHODS = {
    **in_table(),
    "qlora": Method(config=linear(peft.LoraConfig, r=3), base="nf4", merges=False),
    "tied": Method(
        config=linear(
            peft.LoraConfig,
            r=3,
            target_modules=["c_attn", "wte"],
            modules_to_save=["lm_head"],
            fan_in_fan_out=True,
            ensure_weight_tying=True,
        ),
        base="gpt2",
    ),
    "eva": Method(
        config=linear(
            peft.LoraConfig, r=3, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0)
        ),
        after=eva,
        stands_alone=False,
    ),
    "lora_ga": Method(
        config=linear(
            peft.LoraConfig, r=3, init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig()
        ),
        before=lora_ga,
        stands_alone=False,
    ),
    "corda": Method(
        config=linear(
            peft.LoraConfig,
            r=3,
            init_lora_weights="corda",
            corda_config=CordaConfig(corda_method="ipm"),
        ),
        before=corda,
        stands_alone=False,
    ),
    "loftq": Method(
        config=linear(
            peft.LoraConfig,
            r=3,
            init_lora_weights="loftq",
            loftq_config=peft.LoftQConfig(loftq_bits=4, loftq_iter=2),
        ),
        before=loftq,
        whens=("before",),
        stands_alone=False,
    ),
    "xlora": Method(
        config=lambda: peft.XLoraConfig(
            task_type="CAUSAL_LM", hidden_size=16, adapters={}, layerwise_scalings=True
        ),
        base="uncached",
        before=experts,
        merges=False,
    ),
    "adalora": Method(
        base="llama",
        config=linear(peft.AdaLoraConfig, init_r=3, target_r=2, total_step=6),
        stepped=lambda model, step: model.base_model.update_and_allocate(step),
    ),
    "pvera": Method(
        base="llama", config=linear(peft.PveraConfig, r=4, target_modules=SQUARE), draws=True
    ),
    "lily": Method(
        base="llama",
        config=linear(peft.LilyConfig, r=3, target_modules=["down_proj", "o_proj"]),
        merges=False,
        mixes=True,
    ),
    "osf": Method(config=linear(peft.OSFConfig, effective_rank=4), unmerges=False),
    "poly": Method(
        base="llama",
        config=linear(peft.PolyConfig, task_type="CAUSAL_LM", r=2, n_tasks=2, n_skills=2),
        inputs=TASKS,
        merges=False,
        draws=True,
    ),
    "shadow": Method(
        base="llama",
        config=lambda: peft.ShadowConfig(r=3, shadow_dropout=0.0, task_type="CAUSAL_LM"),
        merges=False,
    ),
    "adaption_prompt": Method(
        base="llama",
        config=lambda: peft.AdaptionPromptConfig(
            adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM"
        ),
        merges=False,
    ),
    "prompt_tuning": Method(config=prompt(peft.PromptTuningConfig), merges=False),
    "multitask_prompt_tuning": Method(
        config=prompt(peft.MultitaskPromptTuningConfig, num_tasks=2), merges=False, inputs=TASKS
    ),
    "prefix_tuning": Method(base="llama", config=prompt(peft.PrefixTuningConfig), merges=False),
    "prefix_projection": Method(
        config=prompt(peft.PrefixTuningConfig, prefix_projection=True, encoder_hidden_size=8),
        merges=False,
    ),
    "p_tuning": Method(
        config=prompt(peft.PromptEncoderConfig, encoder_hidden_size=8), merges=False
    ),
    "cartridge": Method(base="llama", config=prompt(peft.CartridgeConfig), merges=False),
    # types in fours, the last of which is the label: else peft's loss has no targets, and is NaN
    "cpt": Method(
        config=lambda: peft.CPTConfig(
            task_type="CAUSAL_LM",
            cpt_token_ids=[4, 5, 6],
            cpt_mask=[1, 1, 1],
            cpt_tokens_type_mask=[1, 2, 4],
        ),
        merges=False,
    ),
}


def base_of(name):
    """Always the same values."""
    if name in test_transformers.MODELS:
        return test_transformers.make(name)
    if name == "uncached":
        model = base_of("layer")
        model.config.use_cache = False
        return model
    if name == "nf4":
        return quantized(base_of("layer"))
    torch.manual_seed(3)
    settings = {"num_hidden_layers": 1, **test_transformers.LAYER}
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=3, **settings))
    bias = name == "llama_bias"
    config = hf.LlamaConfig(attention_bias=bias, mlp_bias=bias, **settings)
    return test_transformers.spread(hf.LlamaForCausalLM(config))


def quantized(model):
    """Its linear layers but the head in 4 bits."""
    from bitsandbytes.nn.modules import Linear4bit  # not beside every GPU

    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parent, _, leaf = name.rpartition(".")
            layer = Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=torch.float32,
                quant_type="nf4",
            )
            layer.load_state_dict(module.state_dict())
            # where the CPU has AVX512-BF16: another layout and other rounding in evaluation
            layer.support_avx512bf16_for_cpu = False
            model.get_submodule(parent).add_module(leaf, layer.to("cpu"))  # it is rounded there
    return model


def perturb(model):
    """Let adapters do something."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)


def adapted(method, base):
    """A model with adapters that do something."""
    torch.manual_seed(11)
    config = method.config()
    method.before(base, config)
    torch.manual_seed(12)
    model = peft.get_peft_model(base, config)
    if isinstance(base, bmt.DistributedModule):
        model = bmt.BMTrainModelWrapper(model)
    method.after(model)
    return model.train(not method.draws)


def batch(method, model, step):
    inputs = {**test_transformers.batch(model, step), **method.inputs}
    if method.mixes:
        rows = test_transformers.ROWS // bmt.world_size()
        inputs = {key: x[:rows].repeat(bmt.world_size(), 1) for key, x in inputs.items()}
    return inputs


def check(name, method, folder):
    """One plain model, and those that were wrapped before and after the adapters were put in."""
    plain = adapted(method, base_of(method.base))
    perturb(plain)
    sharded = {f"{name}, {when} wrapping": wrapped(method, when) for when in method.whens}
    for here, model in sharded.items():
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        models.assert_same_state(model, plain, f"{here}: values")
    train(method, plain, sharded)
    plain.eval()
    for here, model in sharded.items():
        model.eval()
        assert_same_answers(method, model, plain, f"{here}: trained")
        with model.disable_adapter(), plain.disable_adapter():
            assert_same_answers(method, model, plain, f"{here}: without adapters")
        if "before" in here:
            generate(here, method, plain, model)
            save(here, method, plain, model, folder)
    if method.merges:
        merge(method, plain, sharded)


def wrapped(method, when):
    base = base_of(method.base)
    model = adapted(method, bmt.BMTrainModelWrapper(base) if when == "after" else base)
    perturb(model)
    return bmt.BMTrainModelWrapper(model)


SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}


def train(method, plain, sharded):
    """Two steps: losses, gradients, values."""
    stepper = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **SETTINGS)
    managers = {here: OptimManager() for here in sharded}
    for here, model in sharded.items():
        chosen = [param for param in model.parameters() if param.requires_grad]
        managers[here].add_optimizer(AdamOptimizer(chosen, **SETTINGS))
    for step in range(2):
        inputs = batch(method, plain, step)
        want = plain(**inputs).loss
        want.backward()
        for here, model in sharded.items():
            got = model(**test_transformers.own_rows(inputs)).loss
            mean = bmt.sum_loss(got.detach())
            models.assert_same(mean, want.detach(), f"{here}: loss")
            managers[here].backward(got)
            test_transformers.assert_gradients(model, plain, here)
            managers[here].step()
            if here.startswith("lora,"):
                assert_frozen_apart(model, managers[here].optimizers[0])
            method.stepped(model, step)
            managers[here].zero_grad()
        stepper.step()
        method.stepped(plain, step)
        stepper.zero_grad()
    for here, model in sharded.items():
        assert trained(model) == trained(plain), f"{here}: what is trained"
        models.assert_same_state(model, plain, f"{here}: trained")


def assert_frozen_apart(model, optimizer):
    """What is frozen has no memory for gradients, and what is trained state of its own size."""
    for name, param in model.named_parameters():
        storage = param.storage_of
        members = {other.requires_grad for other in storage.params if other is not None}
        assert members == {param.requires_grad} == {storage.gradient.flat is not None}, name
    for param, state in optimizer.state.items():
        assert state["exp_avg"].local.numel() == own_slice(param).numel()
    assert len(optimizer.state) == len(trained(model))


def trained(model):
    """Names of the parameters that are."""
    return {name for name, param in model.named_parameters() if param.requires_grad}


def assert_same_answers(method, got, want, what):
    inputs = batch(method, want, 5)
    with torch.no_grad():
        models.assert_same(got(**inputs).logits, want(**inputs).logits, f"{what}: logits")


def generate(here, method, plain, model):
    rows = slice(bmt.rank(), bmt.rank() + 1)
    prompt = test_transformers.batch(plain, 0)["input_ids"][rows]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 2, "do_sample": False}
    options |= {key: value[rows] for key, value in method.inputs.items()}
    want = plain.generate(input_ids=prompt, **options)
    got = model.generate(input_ids=prompt, **options)
    assert torch.equal(got, want), f"{here}: generate gives {got} instead of {want}"


def save(here, method, plain, model, folder):
    own, theirs = folder / f"{here}-{bmt.world_size()}", folder / f"{here}-plain-{bmt.rank()}"
    model.save_pretrained(own)
    plain.save_pretrained(theirs)
    bmt.synchronize()
    got, want = (
        safetensors.torch.load_file(path / "adapter_model.safetensors") for path in (own, theirs)
    )
    models.assert_same_dicts(got, want, f"{here}: adapter file")
    if here.startswith("lora,"):
        other = wrapped(method, "before")
        peft.set_peft_model_state_dict(other, want)
        models.assert_same_state(other, plain, f"{here}: set")
    if method.stands_alone:
        torch.manual_seed(12)
        loaded = peft.PeftModel.from_pretrained(base_of(method.base), own).eval()
        assert_same_answers(method, loaded, plain, f"{here}: adapter file in plain peft")


def merge(method, plain, sharded):
    for name in ("merge_adapter", "unmerge_adapter")[: 2 if method.unmerges else 1]:
        getattr(plain, name)()
        for here, model in sharded.items():
            getattr(model, name)()
            assert trained(model) == trained(plain), f"{here}: {name} changes what is trained"
            models.assert_same_state(model, plain, f"{here}: {name}")
            if name == "merge_adapter":
                assert_same_answers(method, model, plain, f"{here}: {name}")
    if method.unmerges and not method.draws:
        train(method, plain, sharded)
    plain = plain.merge_and_unload()
    for here, adapters in sharded.items():
        model = adapters.merge_and_unload()
        tied = [each.config.tie_word_embeddings for each in (plain, model)]
        assert tied[0] == tied[1], f"{here}: the embedding is tied to the head: {tied}"
        models.assert_same_state(model, plain, f"{here}: merged")
        bare = dataclasses.replace(method, inputs={})
        assert_same_answers(bare, model, plain, f"{here}: merged")


def methods(names, folder):
    ignore_warnings()
    for name in names:
        check(name, METHODS[name], pathlib.Path(folder))


def training():
    """LoRA, wrapped before and after."""
    ignore_warnings()
    method = METHODS["lora"]
    plain = adapted(method, base_of(method.base))
    perturb(plain)
    train(method, plain, {f"lora, {when} wrapping": wrapped(method, when) for when in method.whens})


def files(folder):
    """Byte for byte, where rank 0 alone does the work: adapters that a model of transformers has
    itself, and PiSSA's as LoRA of the model as it was.
    """
    ignore_warnings()
    for when, program in itertools.product(("before", "after"), (own_adapters, converted)):
        places = []
        for kind in ("plain", "sharded"):
            base = base_of("layer")
            if kind == "sharded" and when == "after":
                base = bmt.BMTrainModelWrapper(base)
            torch.manual_seed(5)
            place = pathlib.Path(folder, f"{program.__name__}-{when}-{kind}")
            if kind == "sharded":
                program(base, place, bmt.BMTrainModelWrapper)
            elif bmt.rank() == 0:
                program(base, place, lambda model: model)
            bmt.synchronize()
            places.append(place)
        plain, sharded = map(test_transformers.contents, places)
        assert plain and sharded == plain, (program.__name__, when)


def own_adapters(base, place, wrap):
    base.add_adapter(linear(peft.LoraConfig, r=2)())
    wrap(base).save_pretrained(place)


def converted(base, place, wrap):
    first = place.with_name(f"{place.name}-first")
    config = linear(peft.LoraConfig, r=2, init_lora_weights="pissa")()
    model = wrap(peft.get_peft_model(base, config))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(first)
    model.peft_config["default"].init_lora_weights = "pissa"
    perturb(model)
    model.save_pretrained(place, path_initial_model_for_weight_conversion=str(first))


def ignore_warnings():
    """What peft and transformers say of themselves."""
    warnings.filterwarnings("ignore", message=".*is deprecated and will be removed in v6")
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    warnings.filterwarnings("ignore", message=".*embedding and the head are no longer tied")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # LoRA-GA's
    warnings.filterwarnings("ignore", module=r"(peft|transformers)\.")


SHORT = ["lora", "dora", "prefix_tuning"]


def test_lora_dora_and_prefixes(tmp_path):
    """Of a model with several layers; keys and values of prefixes arrive in the cache."""
    run_ranks(methods, 2, SHORT, str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("first", range(4))
def test_methods(first, tmp_path):
    """Every fourth method of the others; `test_corda` has the one that is left out."""
    names = [name for name in METHODS if name not in ("corda", *SHORT)]
    run_ranks(methods, 2, names[first::4], str(tmp_path), timeout=240)


@pytest.mark.long
def test_corda(tmp_path):
    pytest.importorskip("attr", reason="peft imports it for CorDA, and does not ask for it")
    run_ranks(methods, 2, ["corda"], str(tmp_path))


@on_ranks(2)
def test_refused():
    """What no sharded tensor can become: an error on every rank."""
    ignore_warnings()
    model = bmt.BMTrainModelWrapper(base_of("layer"))
    method = METHODS["loftq"]
    with pytest.raises(RuntimeError, match="subclass Params4bit"):
        adapted(method, model)
    method = METHODS["pissa"]
    plain, model = adapted(method, base_of("layer")), wrapped(method, "after")
    perturb(plain)
    train(method, plain, {"after a refusal": model})


@pytest.mark.long
def test_files(tmp_path):
    run_ranks(files, 2, str(tmp_path))
