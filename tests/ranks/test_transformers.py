"""Models of transformers, wrapped as they are, against the same models in one process of plain
PyTorch.
"""

import copy
import pathlib
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import own_slice
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ParameterError
from bmtrain.optim import AdamOptimizer

VOCAB, ROWS, LENGTH = 41, 6, 6
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


LAYER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attn_implementation": "eager",
    **SMALL,
}


def gpt2():
    """Learned positions, embedding and head tied, Conv1D layers."""
    off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2, **SMALL, **off)
    )


def llama():
    """Rotary positions from a buffer that is in no file, grouped keys, embedding and head apart."""
    config = hf.LlamaConfig(num_hidden_layers=2, max_position_embeddings=32, **LAYER)
    return hf.LlamaForCausalLM(config)


def bert():
    """Pooler, two heads, embedding and decoder tied."""
    config = hf.BertConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SMALL,
    )
    return hf.BertForPreTraining(config)


def t5():
    """Two stacks of different layers that share an embedding; the first layer's position bias goes
    through all others.
    """
    config = hf.T5Config(  # type: ignore[call-arg]  # and decoder_start_token_id
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        **SMALL,
    )
    return hf.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}


def make(name):
    """Always the same values, and far enough from zero that every parameter matters."""
    torch.manual_seed(3)
    return spread(MODELS[name]())


def spread(model):
    """In training, with values that are not just those of the beginning."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.05)
    return model.train()


def batch(model, step):
    """Inputs of a step for all ranks together, one row padded; as many targets in every row."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    out = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.roll(1, 1)}
    if isinstance(model, hf.BertPreTrainedModel):
        out["next_sentence_label"] = torch.randint(0, 2, (ROWS,), generator=generator)
    return out


def own_rows(inputs):
    """This rank's part."""
    return {key: models.own(value) for key, value in inputs.items()}


def assert_gradients(got, want, what):
    """This rank's slices of what is trained, on the scale of the model's gradients: some are nothing
    but rounding, as that of a key's bias. What is frozen has none.
    """
    grads = {name: param.grad for name, param in want.named_parameters()}
    floor = 1e-2 * max(grad.abs().max().item() for grad in grads.values() if grad is not None)
    named = dict(got.named_parameters())
    assert named.keys() == grads.keys(), what
    for name, grad in grads.items():
        param = named[name]
        assert (param.grad is None) == (grad is None), f"{what}: gradient of {name}"
        if grad is not None:
            own = param.cut.own(grad)
            error = (own_slice(param.grad) - own).abs().amax().item() if own.numel() else 0.0
            assert error <= 1e-5 * max(grad.abs().max().item(), floor), (
                f"{what}: gradient of {name} is off by {error:g}"
            )


def train_both(what, plain, model, steps=range(2)):
    """Train `plain` on whole batches and the wrapped `model` on this rank's rows; they stay
    equal.
    """
    # With the usual eps a gradient of nothing but rounding would move its parameter as far as any
    # other.
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
    stepper = torch.optim.AdamW(plain.parameters(), **settings)
    manager = models.managed(AdamOptimizer(model.parameters(), **settings))
    for step in steps:
        here = f"{what}, step {step}, {bmt.world_size()} ranks"
        inputs = batch(plain, step)
        stepper.zero_grad()
        manager.zero_grad()
        want, got = plain(**inputs).loss, model(**own_rows(inputs)).loss
        models.assert_same(
            bmt.gather_result(got.detach().view(1)).mean(), want.detach(), f"{here}: loss"
        )
        want.backward()
        manager.backward(got)
        assert_gradients(model, plain, here)
        stepper.step()
        manager.step()
    models.assert_same_state(model, plain, f"{what} after the last step")


def training():
    for name in MODELS:
        plain = make(name)
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
        assert type(plain) is model.__class__ and isinstance(model, type(plain))
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert list(model.state_dict()) == list(plain.state_dict())
        train_both(name, plain, model)


def checkpointing_flags():
    """transformers' own checkpointing inside of blocks that recompute themselves or not."""
    for name, reentrant, first in (
        ("llama", True, True),
        ("llama", False, False),
        ("t5", True, False),
        ("gpt2", False, True),
    ):
        plain = make(name)
        model = copy.deepcopy(plain)
        with warnings.catch_warnings():
            # the name is deprecated in newest versions, its successor missing in older ones
            warnings.simplefilter("ignore")
            arguments = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
            plain.gradient_checkpointing_enable(**arguments)
            # without it reentrant checkpoints of the first layer have no gradient
            plain.enable_input_require_grads()
            if first:
                model.gradient_checkpointing_enable(**arguments)
            model = bmt.BMTrainModelWrapper(model)
            if not first:
                model.gradient_checkpointing_enable(**arguments)
            model.enable_input_require_grads()
        layers = [module for module in model.modules() if isinstance(module, bmt.Block)]
        assert layers and all(layer.gradient_checkpointing for layer in layers)
        for recompute in (True, False):
            for layer in layers:
                layer.use_checkpoint = recompute
            train_both(
                f"{name}, checkpointing, reentrant={reentrant}, {recompute=}",
                plain,
                model,
                range(1),
            )
        assert all(isinstance(param, bmt.DistributedParameter) for param in model.parameters())


def outputs():
    """Hidden states and attentions, which transformers records with hooks on modules that it looks
    for by class.
    """
    for name in MODELS:
        plain = make(name)
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
        for module in (plain, model):
            module.set_attn_implementation("eager")
        options = {"output_hidden_states": True, "output_attentions": True, **batch(plain, 0)}
        want, got = plain(**options), model(**options)
        assert list(want) == list(got)
        seen = 0
        for key in want:
            pairs = zip(
                *[x if isinstance(x, tuple) else (x,) for x in (got[key], want[key])], strict=True
            )
            for a, b in pairs:
                if isinstance(b, torch.Tensor):
                    models.assert_same(a.detach(), b.detach(), f"{name}: {key}")
                    seen += 1
        assert seen > 5, (name, list(want))
        (
            sum(h.square().mean() for h in want.get("hidden_states") or want.encoder_hidden_states)
            * 1.0
        ).backward()
        (
            sum(h.square().mean() for h in got.get("hidden_states") or got.encoder_hidden_states)
            / bmt.world_size()
        ).backward()
        assert_gradients(model, plain, f"{name}: gradients by way of hidden states")


def generating():
    """Greedy search with a cache; ranks have prompts of their own, and some sequences end early."""
    for name in ("gpt2", "llama", "t5"):
        plain = make(name).eval()
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain)).eval()
        assert not any(module.training for module in model.modules())
        prompt = batch(plain, 0)["input_ids"][bmt.rank() : bmt.rank() + 1]
        lengths = [3 + 4 * bmt.rank(), 9 - 2 * bmt.rank()]
        for length in lengths:  # ranks that stop at different times
            options = {
                "attention_mask": torch.ones_like(prompt),
                "max_new_tokens": length,
                "do_sample": False,
            }
            want = plain.generate(prompt, **options)
            got = model.generate(prompt, **options)
            assert torch.equal(got, want), f"{name}: {got} instead of {want}"
        model.train()
        assert all(module.training for module in model.modules())


def pretrained(folder):
    """save_pretrained on all ranks; from_pretrained, then wrapped."""
    for name in MODELS:
        path = pathlib.Path(folder, f"{name}-{bmt.world_size()}")
        plain = other_values(name)
        model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
        model.save_pretrained(path, max_shard_size="5KB")  # several files and an index
        theirs = pathlib.Path(folder, f"{name}-plain-{bmt.rank()}")
        plain.save_pretrained(theirs, max_shard_size="5KB")
        bmt.synchronize()
        if bmt.rank() == 0:  # transformers writes nothing elsewhere
            assert contents(path) == contents(theirs), f"{name}: other files"
        loaded = type(plain).from_pretrained(path)
        assert loaded.config.architectures == [type(plain).__name__]
        models.assert_same_state(loaded, plain, f"{name}: from_pretrained", 0.0)
        again = bmt.BMTrainModelWrapper(loaded)
        bmt.load(again, path)
        bmt.save(model, path / "all.pt")
        plain.load_state_dict(torch.load(path / "all.pt"), strict=True)
        assert_same_answers(again, plain, f"{name}: from_pretrained, wrapped")
    occupied = pathlib.Path(folder, f"a file {bmt.world_size()}")
    occupied.touch()
    with pytest.raises((OSError, RuntimeError), match="a file"):
        model.save_pretrained(occupied / "folder")


def contents(folder):
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def other_values(name):
    """The model of this name with values of its own."""
    model = make(name)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.1)
    return model


def assert_same_answers(got, want, what):
    got.eval(), want.eval()
    with torch.no_grad():
        a, b = (model(**batch(want, 5)) for model in (got, want))
    for key in ("loss", "logits", "prediction_logits"):
        if key in b:
            models.assert_same(a[key], b[key], f"{what}: {key}")


@pytest.mark.fresh  # a progress bar leaves a thread
def test_files(tmp_path):
    """What a wrapped model writes a plain one takes, and the other way round."""
    run_ranks(pretrained, 2, str(tmp_path))


def from_meta():
    """Parameters come from a file; a buffer in no file is NaN until it gets its values, of which a
    warning tells.
    """
    plain = make("llama").eval()
    with torch.device("meta"):
        empty = llama().eval()
    with pytest.warns(UserWarning, match=r"no file has.*rotary_emb\.inv_freq.*NaN.*get_buffer"):
        model = bmt.BMTrainModelWrapper(empty)
    with pytest.raises(ParameterError, match=r"weight.*meta.*checkpoint"):
        bmt.init_parameters(model)
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert model(**batch(plain, 0)).logits.isnan().all()
    for name, buffer in plain.named_buffers():
        model.get_buffer(name).copy_(buffer)
    assert_same_answers(model, plain, "from meta")


def bad_input():
    quantised = gpt2()
    layer = quantised.transformer.h[1].mlp.c_fc
    layer.weight = nn.Parameter(layer.weight.detach().char(), requires_grad=False)
    before = layer.weight.clone()
    trained = gpt2()
    layer = trained.transformer.h[1].mlp.c_fc
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.complex64))
    with pytest.raises(
        ParameterError,
        match=r"'transformer\.h\.1\.mlp\.c_fc\.weight' is torch\.complex64.*Freeze it",
    ):
        bmt.BMTrainModelWrapper(trained)
    assert not any(isinstance(param, bmt.DistributedParameter) for param in trained.parameters()), (
        "half a model was changed"
    )
    kept = bmt.BMTrainModelWrapper(quantised).transformer.h[1].mlp.c_fc.weight
    assert kept.dtype == torch.int8 and torch.equal(kept, before), (
        "every rank keeps what nobody trains whole"
    )
    model = bmt.BMTrainModelWrapper(llama())
    with pytest.raises(ParameterError, match=r"resize_token_embeddings.*sharded.*before"):
        model.resize_token_embeddings(VOCAB + 3)
    plain = llama()
    plain.load_state_dict(model.state_dict())
    train_both("after refusals", plain, model, range(1))


@pytest.mark.parametrize("program", [from_meta, bad_input])
def test_limits(program):
    """Models from the meta device; errors that name the parameter, before anything is changed."""
    run_ranks(program, 2)


@pytest.mark.parametrize(
    ("program", "world_size"),
    [
        (training, 3),
        pytest.param(outputs, 2, marks=pytest.mark.fresh),
        (generating, 3),
        (checkpointing_flags, 2),
    ],
)
def test_program(program, world_size):
    """What the function of this name states, for each model."""
    run_ranks(program, world_size)
