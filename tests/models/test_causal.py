"""Decoder-only models against their counterparts in transformers: GPT-2, GPT-J, LLaMA, Mistral,
OPT, Qwen2 and Qwen3.
"""

import copy

import pytest
import torch
import transformers
from tests.models import parity
from tests.models.parity import SIDES, assert_close, refuse, token_ids
from tests.models.versions import rope
from tests.ranks.runner import run_ranks

from model_center import model as models
from model_center.errors import ConfigError, WeightsError
from model_center.model import GPTj, GPTjConfig, Llama, LlamaConfig
from model_center.model.registry import model_class

LENGTH = 12
GPT = "vocab_size=64 n_embd=32 n_layer=2 n_positions=16"
SIZES = "vocab_size=64 hidden_size=32 num_attention_heads=4 num_hidden_layers=2"
GROUPED = f"{SIZES} num_key_value_heads=2 intermediate_size=48 max_position_embeddings=8"
FAMILIES = {
    "GPT2": f"{GPT} n_head=4",
    "GPTJ": f"{GPT} n_head=2 rotary_dim=8",
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "OPT": f"{SIZES} num_hidden_layers=3 ffn_dim=48 max_position_embeddings=20 layerdrop=0.0",
    "Qwen2": GROUPED,
    "Qwen3": f"{GROUPED} head_dim=10",
}
LLAMA3 = (
    "rope_type=llama3 factor=8.0 low_freq_factor=1.0 high_freq_factor=4.0 "
    "original_max_position_embeddings=32"
)
WINDOW = "tie_word_embeddings=True use_sliding_window=True sliding_window=4 max_window_layers=0"
SHORT = f"""
GPT2
GPT2 tie_word_embeddings=False n_inner=40
GPTJ
Llama num_key_value_heads=1 head_dim=10 hidden_act=gelu
Llama tie_word_embeddings=True {rope(500.0, **parity.values(LLAMA3))}
Mistral sliding_window=4
OPT
OPT do_layer_norm_before=False word_embed_proj_dim=20
Qwen2 {WINDOW}
Qwen3 {WINDOW} attention_bias=True rms_norm_eps=0.1
"""
LONG = f"""
GPT2 scale_attn_weights=False activation_function=gelu layer_norm_epsilon=0.1
GPTJ rotary_dim=16 n_inner=40 activation_function=gelu layer_norm_epsilon=0.1
Llama num_key_value_heads=4
Llama rms_norm_eps=0.1
Llama {rope(1e4, rope_type="linear", factor=4.0)}
Llama attention_bias=True mlp_bias=True
Mistral sliding_window=None
Mistral sliding_window=1 head_dim=12
Mistral sliding_window=50
OPT do_layer_norm_before=False
OPT enable_bias=False activation_function=gelu pad_token_id=None
Qwen2
Qwen3
"""
VARIANTS = [line for line in (SHORT + LONG).splitlines() if line]
OURS = parity.values("vocab_size=64 dim_model=32 num_heads=4 dim_head=8 dim_ff=48 num_layers=2")


def words_of(variant):
    """A class of theirs and values of its configuration: those of the family, and special ones."""
    name, _, special = variant.partition(" ")
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return f"{name}{head} {FAMILIES[name]} {special}"


def inputs_of(side):
    """Ids, some of them those of padding, a mask, and which tokens are valid."""
    ids, mask = token_ids(2, LENGTH, low=0, high=30), parity.padding_mask(2, LENGTH, side)
    ids[1, 5:7] = 1
    return {"input_ids": ids, "attention_mask": mask}, parity.valid_of(mask, ids)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(line, marks=[pytest.mark.long] if line in LONG.splitlines() else [])
        for line in VARIANTS
    ],
)
def test_as_in_transformers(variant, tmp_path):
    """Scores, hidden states, attentions, gradients, files, half precision; in pieces with a cache,
    which holds keys once for each group.
    """
    ours, model = parity.pair(words_of(variant), tmp_path)
    number = VARIANTS.index(variant)
    for side in SIDES:
        parity.assert_same_logits(ours, model, *inputs_of(side))
    inputs, valid = inputs_of(SIDES[number % 3])
    parity.assert_same_gradients(ours, model, inputs, valid, tmp_path)
    parity.assert_same_extras(ours, model, inputs, valid)
    parity.assert_saved_alike(ours, model, inputs, valid, tmp_path)
    parity.assert_class_head(type(ours), tmp_path / "theirs", inputs, "cls_projection")
    parity.assert_trains_in((torch.bfloat16, torch.float16)[number % 2], ours, inputs, valid)
    for side in SIDES[:2]:
        given, _ = inputs_of(side)
        parity.assert_cache_agrees(ours, given["input_ids"], 5, given["attention_mask"])
    past = ours(**inputs, use_cache=True).past_key_values
    heads = getattr(ours.config, "num_heads_kv", ours.config.num_heads)
    assert past[1][0].shape == (2, heads, LENGTH, ours.config.dim_head)


@pytest.mark.parametrize("family", ["GPT2", "GPTJ", "Llama", "OPT"])
def test_ways_to_say_the_same(family, tmp_path):
    """Lengths, masks of other dtypes and of pairs, embeddings, other ids; caches as pairs."""
    ours, _ = parity.pair(words_of(family), tmp_path)
    inputs, valid = inputs_of("right")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    pairs = mask[:, None, :].bool() & torch.ones(LENGTH, LENGTH).tril().bool()
    with torch.no_grad():
        want = ours(**inputs).logits
        for other in (
            {"input_ids": ids, "length": mask.sum(1)},
            {"input_ids": ids, "attention_mask": mask.half()},
            {"input_ids": ids.int(), "attention_mask": mask.bool()},
            {"inputs_embeds": ours.input_embedding(ids), "attention_mask": mask},
            {"input_ids": ids, "attention_mask": pairs},
        ):
            assert_close(ours(**other).logits[valid], want[valid], str(other.keys()))
        first = ours(input_ids=ids[:, :7], use_cache=True, attention_mask=pairs[:, :7, :7])
        rest = ours(ids[:, 7:], past_key_values=first.past_key_values, attention_mask=pairs)
        assert_close(rest.logits[valid[:, 7:]], want[:, 7:][valid[:, 7:]])
        everything = ours(ids, attention_mask=torch.ones(2, LENGTH, LENGTH)).logits
        assert not torch.allclose(everything[:, 0], want[:, 0], atol=0.01)
    whole, first = ours(ids).logits[:, 5:], ours(ids[:, :5], use_cache=True)
    rest = ours(ids[:, 5:], past_key_values=[(k, v) for k, v in first.past_key_values])
    assert rest.past_key_values is None
    assert_close(rest.logits, whole, "after a list of pairs")
    found, expected = (
        torch.autograd.grad(scores.square().sum(), ours.input_embedding.weight)[0]
        for scores in (rest.logits, whole)
    )
    scale = expected.abs().max()
    assert_close(found / scale, expected / scale, "gradient through the cache")


@pytest.mark.parametrize("family", ["GPT2", "GPTJ", "Llama", "OPT"])
def test_given_positions(family, tmp_path):
    """OPT's are rows of its table; GPT-J counts whatever it is given, as in ModelCenter. Token
    types change nothing.
    """
    ours, model = parity.pair(words_of(family), tmp_path)
    ids = token_ids(2, 9)
    given = token_ids(2, 9, low=0, high=16, seed=5)
    theirs = {} if family == "GPTJ" else {"position_ids": given}
    own = given + 2 if family == "OPT" else given
    types = {} if family == "Llama" else {"token_type_ids": ids}
    with torch.no_grad():
        whole = ours(ids, position_ids=own, **types).logits
        assert_close(whole, model(input_ids=ids, **theirs).logits)
        past = ours(ids[:, :4], position_ids=own[:, :4], use_cache=True).past_key_values
        rest = ours(ids[:, 4:], position_ids=own, past_key_values=past)
        assert_close(rest.logits, whole[:, 4:], "positions of all tokens, with a cache")


def test_padding_has_a_position_of_its_own(tmp_path):
    """In OPT: the row before that of the first token, wherever the padding is."""
    ours, model = parity.pair(words_of("OPT"), tmp_path)
    for side in SIDES:
        inputs, _ = inputs_of(side)
        found, expected = (
            one(**inputs, output_hidden_states=True).hidden_states[0] for one in (ours, model)
        )
        assert_close(found, expected, f"padding on this side: {side}")


def test_outputs(tmp_path):
    """By name, key, position and as a tuple; a deep copy has parameters of its own."""
    ours, _ = parity.pair(words_of("GPT2"), tmp_path)
    inputs, _ = inputs_of("right")
    out = ours(**inputs)
    plain = ours(**inputs, output_logits=False, return_dict=False)
    assert len(plain) == 5 and plain[1:] == (None,) * 4
    assert torch.equal(plain[0], out["last_hidden_state"])
    assert out[0] is out.last_hidden_state and out[0:2] == out.to_tuple() == (*out.values(),)
    with pytest.raises(AttributeError, match="no attribute 'index_select': the logits are"):
        out.index_select(dim=-1, index=torch.arange(2))
    assert list(out) == out.keys() == ["last_hidden_state", "logits"]
    assert len(out) == 2 and "logits" in out and "attentions" not in out
    copied = copy.deepcopy(ours)
    parity.assert_same_parameters(copied, ours)
    with torch.no_grad():
        copied.input_embedding.weight.add_(1)
    assert torch.equal(ours(**inputs).logits, out.logits)


@pytest.mark.parametrize("family", ["GPT2", "Llama"])
def test_inputs_that_are_refused(family, tmp_path):
    """The model computes as before then."""
    ours, _ = parity.pair(words_of(family), tmp_path)
    ids, ones = token_ids(2, LENGTH), torch.ones
    expected = ours(ids).logits
    refuse(ours, "neither")
    refuse(ours, "expected \\(batch, seq\\)", ids[0])
    refuse(ours, "expected integers", ids.float())
    refuse(ours, "rows got ids", ids + 1000)
    refuse(ours, "expected 12 keys", ids, attention_mask=ones(2, 11))
    refuse(ours, "expected \\(batch, keys\\)", ids, attention_mask=ones(12))
    refuse(ours, "length is of type int: expected a tensor", ids, 3)
    refuse(ours, "expected \\(2,\\), a real number", ids, ones(3).long())
    refuse(ours, "past_key_values has 1 layers", ids, past_key_values=[None])
    refuse(ours, "expected \\(batch, seq, dim_model\\)", inputs_embeds=ones(2, 32))
    assert torch.equal(ours(ids).logits, expected)


@pytest.mark.parametrize(("family", "most"), [("GPT2", 16), ("OPT", 20)])
def test_sequences_longer_than_the_table(family, most, tmp_path):
    ours, _ = parity.pair(words_of(family), tmp_path)
    ids = token_ids(1, most + 1)
    past = ours(ids[:, :most], use_cache=True).past_key_values
    match = f"{most + 1} tokens: .* positions has {most}"
    refuse(ours, match, ids)
    refuse(ours, match, ids[:, :1], past_key_values=past)


def test_configurations_of_theirs_that_are_refused():
    """With what is changed in them; "-" is left out."""
    gpt2, gptj = (f"{name} model_type={name.lower()} {FAMILIES[name]}" for name in ("GPT2", "GPTJ"))
    opt, llama = f"OPT model_type=opt {FAMILIES['OPT']}", f"Llama model_type=llama {GROUPED}"
    mistral = f"Mistral model_type=mistral {GROUPED}"
    qwen2, qwen3 = (f"Qwen{n} model_type=qwen{n} {GROUPED} layer_types" for n in (2, 3))
    parity.refuse_configurations(f"""
{gpt2} scale_attn_by_inverse_layer_idx=True | inverse_layer_idx=True is not supported
{gpt2} model_type=umt5 | model_type is 'umt5'
{gpt2} n_embd=- | of type 'gpt2' lacks 'n_embd'
{gpt2} vocab_size=0 | expected a whole number above 0
GPT2 num_layer=3 | 'num_layer' .nearest: 'num_layers'.
{gptj.replace("GPTJ", "GPTj")} rotary_dim=- | lacks 'rotary_dim'
{llama} rope_parameters={{'partial_rotary_factor':0.5}} | partial_rotary_factor=0.5
{llama} rope_scaling=3 | rope_scaling is a int: expected a mapping
{mistral} sliding_window=0 | sliding_window is 0
{opt} tie_word_embeddings=False | tie_word_embeddings=False
{gptj.replace("GPTJ", "GPTj")} tie_word_embeddings=True | the head of GPT-J has a bias
{opt} layer_norm_elementwise_affine=False | not supported
{opt} _remove_final_layer_norm=True | not supported
{qwen2}=None use_sliding_window=True sliding_window=4 max_window_layers=1 | several kinds
{qwen3}=['full_attention','sliding_attention'] | several kinds of attention
{qwen2}=['sliding_attention'] | there is no window
{qwen3}=['linear_attention'] | 'linear_attention'
""")


@pytest.mark.parametrize(
    "line",
    """
GPT2 att_bias=False | att_bias is False, there it is True
GPT2 tied=False | proj_bias is True
GPTj att_bias=True | att_bias is True, there it is False
Llama proj_bias=True | proj_bias is True
Llama post_layer_norm=True | post_layer_norm is True
Llama num_heads_kv=3 | num_heads_kv is 3
Llama rope_scaling={'rope_type':'yarn','factor':2.0} | 'yarn' is not supported
Llama rope_scaling={'rope_type':'llama3','factor':8.0,'high_freq_factor':4.0} | low_freq_factor
GPTj pos_rotary_dim=3 | expected an even number
Mistral att_bias=True | att_bias is True
OPT norm_eps=0.5 | norm_eps is 0.5, there it is 1e-05
OPT ffn_bias=False | ffn_bias is False, there it is True
Qwen2 att_bias=False | att_bias is False
Qwen2 dim_head=6 | dim_head is 6, there it is 8
Qwen3 ffn_bias=True | ffn_bias is True
""".strip().splitlines(),
)
def test_configurations_of_ours_that_are_refused(line, tmp_path):
    """By the model, or where it is written for transformers; ModelCenter's format holds them."""
    change, _, match = line.partition(" | ")
    name, _, special = change.partition(" ")
    own = OURS | {"half": False}
    own |= {"num_heads_kv": 2} if name in {"Llama", "Mistral", "Qwen2", "Qwen3"} else {}
    own |= {"pos_rotary_dim": 4} if name == "GPTj" else {}
    config = vars(models)[f"{name}Config"](**own | parity.values(special))
    kind = vars(models)[name]
    with pytest.raises(ConfigError, match=match):
        kind(config).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line",
    """
Llama rms_norm_eps=1e-5 rope_theta=123.0 rope_scaling={'type':'linear','factor':2.0} | \
num_heads_kv=4 dim_head=8 norm_eps=1e-5 rope_base=123.0 rope_scaling={'type':'linear','factor':2.0}
Llama rope_theta=5e5 rope_scaling=None | rope_base=5e5 rope_scaling=None tied=False
Llama rope_parameters={'rope_type':'default','rope_theta':7.0} | rope_base=7.0 rope_scaling=None
Mistral sliding_window=None | sliding_window=None
Mistral head_dim=6 | sliding_window=4096 dim_head=6
Qwen2 sliding_window=4 max_window_layers=1 | sliding_window=None att_bias=True
Qwen2 use_sliding_window=True sliding_window=4 max_window_layers=28 | sliding_window=None
Qwen2 use_sliding_window=True sliding_window=4 max_window_layers=0 | sliding_window=4
Qwen3 attention_bias=True | att_bias=True dim_head=128
""".replace("\\\n", "")
    .strip()
    .splitlines(),
)
def test_configurations_that_say_little(line):
    """Those of LLaMA's first files, of transformers 4, and windows that are not used."""
    change, _, expected = line.partition(" | ")
    name, _, special = change.partition(" ")
    content = parity.values(f"{SIZES} intermediate_size=48 {special}") | {
        "model_type": name.lower()
    }
    config = model_class(content)._CONFIG_TYPE.from_dict(content)
    wanted = parity.values(expected)
    assert {key: getattr(config, key) for key in wanted} == wanted


def test_sizes_that_modelcenters_converter_writes():
    assert LlamaConfig().num_heads_kv == LlamaConfig().num_heads == 32
    config = LlamaConfig.from_dict(OURS | {"num_heads_kv": 2, "norm_eps": 1e-5})
    key = Llama(config).get_parameter("encoder.layers.0.self_att.self_attention.project_k.weight")
    assert key.shape == (16, 32) and key.dtype == config.dtype == torch.float16


def written_at_ranks(folder):
    GPTj.from_pretrained(folder / "own").save_pretrained(folder / "ranks")


def test_the_two_norms_of_gptj(tmp_path):
    """A layer has two, as in ModelCenter, whose files have both; transformers' have one for both:
    what is written there computes the same.
    """
    model = parity.randomized(GPTj(GPTjConfig(**OURS, pos_rotary_dim=4, half=False)))
    ids = token_ids(2, 9)
    before = model(ids).logits
    names = [
        f"encoder.layers.{layer}.{name}.{kind}"
        for layer in range(2)
        for name in ("self_att.layernorm_before_attention", "ffn.layernorm_before_ffn")
        for kind in ("weight", "bias")
    ]
    for name in names:
        param = model.get_parameter(name)
        (grad,) = torch.autograd.grad(model(ids).logits.square().sum(), param)
        assert grad.abs().max() > 1e-3
        with torch.no_grad():
            param += 0.5
            assert (model(ids).logits - before).abs().max() > 1e-3
            param -= 0.5
    parity.assert_own_format(model, tmp_path)
    model.save_pretrained(tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    for again in (theirs, GPTj.from_pretrained(tmp_path / "hf", half=False)):
        torch.testing.assert_close(again(ids).logits, before, rtol=1e-5, atol=1e-5)
    run_ranks(written_at_ranks, 2, tmp_path)
    one, two = (tmp_path / name / "model.safetensors" for name in ("hf", "ranks"))
    assert one.read_bytes() == two.read_bytes()
    with torch.no_grad():
        model.get_parameter(names[0])[0] = 0.0  # of which no multiple is the other norm's
    with pytest.raises(WeightsError, match=r"are one tensor, .*ln_1.* but differ: it cannot hold"):
        model.save_pretrained(tmp_path / "hf")
    weights = model.state_dict()
    del weights[names[-1]]
    torch.save(weights, tmp_path / "own" / "pytorch_model.pt")
    with pytest.raises(WeightsError, match=names[-1]):
        GPTj.from_pretrained(tmp_path / "own")
