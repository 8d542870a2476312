"""Calls that programs of ModelCenter make, and what they mean there."""

import inspect
from typing import Any

import pytest
import torch
from tests.models import parity, small
from tests.models.parity import assert_close, randomized

from model_center import model as models
from model_center.errors import InputError, WeightsError
from model_center.generation import generate
from model_center.layer.dense_attention import Attention
from model_center.layer.linear import Linear
from model_center.layer.mask import mask_of_lengths
from model_center.model import CPM1, GPT2, GPT2Config

IDS = parity.token_ids(2, 8)
IDS[:, :3] = torch.tensor([2, 3, 4])  # the prompt of CPM-3
TWO_STACKS = ("T5", "CPM2")
NAMES = ("Bert", "GPT2", "GPTj", "OPT", "CPM1", "CPM3", "T5", "Llama", "Longformer")
MASK = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]])
LENGTH = torch.tensor([8, 3])


def made(name, values="dropout_p=0.0"):
    """A small model with its first values."""
    return vars(models)[name](small.config(name, **parity.values(values)))


def scores(model, **inputs):
    """Of all tokens."""
    if type(model).__name__ in TWO_STACKS:
        inputs.setdefault("decoder_input_ids", IDS)
    return parity.logits_of(parity.scored(model, inputs))


def test_lengths_of_floating_point():
    """Programs give `torch.Tensor([n])`; fp16 and bf16 have no numbers between their steps."""
    for dtype in (torch.int32, torch.float32, torch.float16, torch.bfloat16):
        assert mask_of_lengths(torch.tensor([2064, 0], dtype=dtype), 2080).sum(1).tolist() == [
            2064,
            0,
        ]


@pytest.mark.parametrize("name", NAMES)
def test_which_argument_counts(name):
    """Of length and mask the mask, in LLaMA the length; of ids and embeddings the embeddings;
    masks of heads never.
    """
    model = randomized(made(name))
    both = scores(model, input_ids=IDS, length=LENGTH, attention_mask=MASK)
    one = {"length": LENGTH} if name == "Llama" else {"attention_mask": MASK}
    assert torch.equal(both, scores(model, input_ids=IDS, **one))
    by_length = scores(model, input_ids=IDS, length=LENGTH)
    assert torch.equal(scores(model, input_ids=IDS, length=LENGTH.float()), by_length)
    if name == "T5":
        given = {"decoder_length": LENGTH, "decoder_attention_mask": MASK}
        both = scores(model, input_ids=IDS, **given)
        assert torch.equal(both, scores(model, input_ids=IDS, decoder_attention_mask=MASK))
    given = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "T5" else {})
    assert torch.equal(model(**given, return_logits=True), scores(model, input_ids=IDS))
    embeds = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(3))
    plain, both = scores(model, input_ids=IDS), scores(model, input_ids=IDS, inputs_embeds=embeds)
    assert torch.equal(both, scores(model, inputs_embeds=embeds)) and not torch.equal(both, plain)
    with pytest.raises(InputError, match=r"\(2, 7, 16\): expected \(2, 8, dim_model\)"):
        scores(model, input_ids=IDS, inputs_embeds=embeds[:, :7])
    with pytest.raises(InputError, match="got neither"):
        scores(model)
    heads = [x for x in inspect.signature(model.forward).parameters if "head_mask" in x]
    assert len(heads) == {"T5": 3, "Llama": 0, "Longformer": 0}.get(name, 1)
    others = dict.fromkeys(heads, torch.zeros(2, 2))
    others |= {"token_type_ids": torch.tensor([[1, 2]])} if name == "CPM1" else {}
    assert torch.equal(scores(model, input_ids=IDS, **others), plain)


def attend(self, query, key_value, attention_mask, position_bias=None, use_cache=False, past=None):
    """An attention as ModelCenter's programs write it (InfLLM)."""
    batch, queries = query.shape[:2]
    q, k, v = (
        part.view(batch, part.shape[1], -1, self.dim_head).transpose(1, 2)
        for part in (self.project_q(query), self.project_k(key_value), self.project_v(key_value))
    )
    if past is not None:
        k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
    score = q @ k.transpose(-1, -2) * self.scale
    if position_bias is not None:
        score = score + position_bias
    hidden = attention_mask.view(batch, 1, queries, k.shape[-2]) == False  # noqa: E712
    mixed = torch.masked_fill(score, hidden, -torch.inf).softmax(-1) @ v
    out = self.attention_out(mixed.transpose(1, 2).reshape(batch, queries, -1))
    return (out, (k, v)) if use_cache else out


@pytest.mark.parametrize("name", ["GPT2", "GPTj"])
def test_parts_are_called(name):
    """Each with the others' outputs, so that hooks and exchanged methods see all: GPT-J's FFN too,
    which it adds beside the attention.
    """
    model = randomized(made(name)).eval()
    want, called = scores(model, input_ids=IDS), []
    parts = [
        part
        for layer in model.encoder.layers
        for part in (layer.self_att, layer.self_att.self_attention, layer.ffn, layer.ffn.ffn)
    ]
    for part in parts:
        part.register_forward_hook(lambda module, *_: called.append(module))
    assert_close(scores(model, input_ids=IDS), want)
    assert set(called) == set(parts)


@pytest.mark.parametrize("name", ["Bert", "GPT2", "T5"])
def test_an_attention_of_the_program(name):
    """`forward` exchanged on each layer: it gets ModelCenter's arguments, masks of pairs, and its
    own keys and values back.
    """
    model = randomized(made(name)).eval()
    steps = [IDS[:, :5], IDS[:, 5:6], IDS[:, 6:]]

    def run():
        found = [scores(model, input_ids=IDS, attention_mask=MASK)]
        past = None
        for ids in steps if name == "GPT2" else ():
            out = model(ids, use_cache=True, past_key_values=past, return_dict=True)
            past = out.past_key_values
            found += [out.logits, *(part for pair in past for part in pair)]
        if name == "GPT2":
            found.append(generate(model, IDS[:, :5], max_new_tokens=9, num_beams=2).sequences)
        return found

    with torch.no_grad():
        want = run()
        for module in model.modules():
            if isinstance(module, Attention):
                module.forward = attend.__get__(module)  # type: ignore[method-assign]  # as programs do
        for got, one in zip(run(), want, strict=True):
            assert_close(got, one)
        if name == "GPT2":
            model.encoder.layers[0].self_att.self_attention.forward = lambda *args: (args[0], 3)
            with pytest.raises(InputError, match="returned int as its cache"):
                model(IDS, use_cache=True)


@pytest.mark.parametrize("name", [*NAMES, "CPM2", "GLM"])
def test_dropout_and_first_values(name):
    """Dropout of embeddings, but for OPT, and in layers; in training only. First values have the
    spread that the configuration names.
    """
    torch.manual_seed(0)
    stds = {"emb": 0.1, "att": 0.3, "ffn": 0.5, "proj": 0.7, "pos": 0.9}
    words = " ".join(f"{part}_init_std={std} {part}_init_mean=2.0" for part, std in stds.items())
    if name not in {"T5", "CPM1", "CPM2", "CPM3"}:
        words, _, _ = words.partition(" pos_")
    model = made(name, f"dropout_p=0.5 {words} proj_bias=False tied=False norm_init_var=3.0")
    stacks = [getattr(model, part, torch.nn.Identity()) for part in ("encoder", "decoder")]
    embed_dropout = getattr(model, "embed_dropout", torch.nn.Identity())
    for in_layers, without in ((False, stacks), (True, [embed_dropout])):
        model.train()
        for part in without:
            part.eval()
        same = torch.equal(scores(model, input_ids=IDS), scores(model, input_ids=IDS))
        assert same == (not in_layers and name in {"OPT", "Llama"})
    model.eval()
    assert torch.equal(scores(model, input_ids=IDS), scores(model, input_ids=IDS))
    kinds = {"type": "", "layernorm": "norm", "position_bias": "pos", "_embedding": "emb"}
    kinds |= {"self_attention": "att", "ffn.ffn": "ffn"}
    kinds |= {"output_projection": "proj", "lm_head.decoder": "proj"}
    for key, param in model.named_parameters():
        kind = next((x for part, x in kinds.items() if part in key), "")
        if kind == "norm" and key.endswith("weight"):
            assert param.eq(3).all(), key
        elif param.dim() > 1 and kind:
            values = param[[0, *range(2, len(param))]]  # without padding
            assert values.std().item() == pytest.approx(stds[kind], rel=0.3), key
            assert values.mean().item() == pytest.approx(2.0, abs=0.3), key
        elif key.endswith("bias"):
            assert not param.any(), key
    if name in {"OPT", "Longformer"}:
        assert not model.input_embedding.weight[1].any()


@pytest.mark.parametrize("name", ["CPM1", "CPM3"])
def test_masks_of_pairs_with_context_and_span(name):
    """Such a mask stands for the context; spans hide what is in others."""
    model = randomized(made(name))
    pairs = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(4)) < 0.6
    context, span = IDS % 2 == 0, torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]] * 2)
    plain = scores(model, input_ids=IDS, attention_mask=pairs)
    assert torch.equal(scores(model, input_ids=IDS, attention_mask=pairs, context=context), plain)
    found = scores(model, input_ids=IDS, attention_mask=pairs, context=context, span=span)
    same = span[:, None, :] == span[:, :, None]
    assert_close(found, scores(model, input_ids=IDS, attention_mask=pairs & same))
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("bias", ["none", "relative"])
def test_a_query_that_sees_nothing_gets_zeros(bias):
    """Before the last map; with gradients that are numbers, and only for that query: what the
    token gets is what it is alone, other tokens do not change it.
    """
    layer = Attention(16, 8, 2, dtype=torch.float, bias=True, init_std=0.5, pos_bias_type=bias)
    torch.nn.init.normal_(layer.attention_out.bias)
    x, ones = torch.randn(2, 5, 16, requires_grad=True), torch.ones(2, 5, 5)
    seen = ones.bool().tril()
    some = layer(x, x, seen, ones)
    seen[1, 3] = False
    others = torch.ones(2, 5, dtype=torch.bool)
    others[1, 3] = False
    visible, shown = layer(x, x, seen, ones, False, None, True)
    assert not shown[1, :, 3].any() and shown[1, :, 2].any()
    for out in (visible, layer(x, x, seen, ones)):
        assert_close(out[1, 3], layer.attention_out.bias)
        assert_close(out[others], some[others])
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert grad.isfinite().all() and grad[0].any()
    model = randomized(made("CPM1" if bias == "relative" else "GPT2"))
    assert isinstance(model, CPM1 | GPT2)
    seen = torch.ones(2, 8, 8).tril()
    seen[:, 5] = 0
    changed = IDS.clone()
    changed[:, [3, 6]] += 1
    one, two = (scores(model, input_ids=ids, attention_mask=seen) for ids in (IDS, changed))
    assert torch.equal(one[:, 5], two[:, 5]) and not torch.equal(one[:, 4], two[:, 4])


@pytest.mark.parametrize("name", ["GPT2", "GPTj", "OPT", "CPM1", "CPM3", "T5", "GLM"])
def test_flags_without_effect(name):
    """`post_layer_norm` and `int8`, which do something in LLaMA alone, and there the first."""
    flags = "dropout_p=0.0 post_layer_norm=True int8=True"
    tied = " tied=False" if name in {"OPT", "GLM"} else ""
    model, other = randomized(made(name)), made(name, flags + tied).eval()
    assert list(other.state_dict()) == list(model.state_dict())
    other.load_state_dict(model.state_dict())
    assert torch.equal(scores(other, input_ids=IDS), scores(model, input_ids=IDS))
    assert Linear(2, 3, int8=True).weight.shape == (3, 2)
    behind, plain = randomized(made("Llama", flags)), made("Llama").eval()
    plain.load_state_dict(behind.state_dict())
    assert (scores(behind, input_ids=IDS) - scores(plain, input_ids=IDS)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["GPT2", "T5", "OPT", "Vit", "Llama", "Bert", "Roberta", "CPM2"])
def test_configurations_by_position(name):
    """Their order is in the table of import paths. It ends where ModelCenter's versions begin to
    differ: LLaMA's fourth is dim_head in its releases and num_heads_kv in its repository.
    """
    kind = vars(models)[f"{name}Config"]
    order = list(kind.arguments())
    values = [getattr(kind(), argument) for argument in order]
    values[0] += 32
    found = kind(*values)
    assert getattr(found, order[0]) == values[0]
    assert found == kind(**dict(zip(order, values, strict=True)))
    with pytest.raises(TypeError, match=f"{name}Config got {order[0]} by position and by name"):
        kind(values[0], **{order[0]: 3})
    with pytest.raises(TypeError, match=f"takes {len(order)} arguments by position: got"):
        kind(*range(len(order) + 1))
    ends = {"Llama": 3, "Bert": 2, "Roberta": 2, "CPM2": 33, "Vit": 14}
    assert ends.get(name, len(order)) == len(order)
    with pytest.raises(TypeError, match=f"{name}Config.*num_layer"):
        kind(num_layer_=3)


def test_loading_what_is_not_all_there(tmp_path):
    """What a file lacks is an error, or, if not strict, initialised and named."""
    randomized(made("GPT2")).save_pretrained(tmp_path, format="model_center")
    weights = torch.load(tmp_path / "pytorch_model.pt", weights_only=True)
    lost = "encoder.layers.1.ffn.layernorm_before_ffn.weight"
    del weights[lost]
    torch.save(weights, tmp_path / "pytorch_model.pt")
    with pytest.raises(WeightsError, match=lost):
        GPT2.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"{lost}: newly initialised"):
        found = GPT2.from_pretrained(tmp_path, strict=False)
    assert found.get_parameter(lost).eq(1).all()
    for name, value in weights.items():
        assert torch.equal(found.state_dict()[name], value), name
    torch.save({**weights, lost: torch.ones(3)}, tmp_path / "pytorch_model.pt")
    with pytest.raises(WeightsError, match=lost):
        GPT2.from_pretrained(tmp_path, strict=False)
    made_: Any = GPT2Config
    assert made_(97, 24, 3, num_layers=2).num_heads == 3


@pytest.mark.parametrize("name", ["CPM1", "CPM3"])
def test_a_position_that_changed_its_meaning(name):
    """The third argument is the context in ModelCenter to 0.1.3, where a fourth follows, and the
    mask later.
    """
    model, context, span = randomized(made(name)), IDS % 2 == 0, IDS * 0
    with pytest.raises(InputError, match=rf"{name} got 4 arguments by position: .*context="):
        model(IDS, LENGTH, context, span)
    by_name = model(IDS, LENGTH, context=context, span=span).logits
    assert_close(by_name, scores(model, input_ids=IDS, length=LENGTH, context=context, span=span))
    assert_close(model(IDS, None, MASK).logits, scores(model, input_ids=IDS, attention_mask=MASK))
