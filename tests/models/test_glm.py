"""GLM against a reference written here, which transformers does not have: row by row, token by
token, explicit softmax.
"""

from __future__ import annotations

import copy
import json
import math
import pathlib

import pytest
import torch
from safetensors.torch import save_file
from tests.models import parity
from tests.tensors import grad_of

from model_center.errors import ConfigError, InputError, WeightsError
from model_center.generation.engine import generate
from model_center.model.glm import GLM, GLMConfig
from model_center.model.outputs import BaseModelOutput
from model_center.model.registry import model_class

VOCAB, DIM, HEADS, LAYERS, FF, POSITIONS = 64, 16, 2, 2, 24, 20
START, END, MASK = 60, 61, 62
# As a config.json of ModelCenter has it.
CONFIG = {
    "vocab_size": VOCAB,
    "dim_model": DIM,
    "num_heads": HEADS,
    "dim_head": DIM // HEADS,
    "dim_ff": FF,
    "num_layers": LAYERS,
    "position_size": POSITIONS,
    "sop_tok_id": START,
    "eop_tok_id": END,
    "mask_tok_id": MASK,
    "dropout_p": 0.0,
    "half": False,
}
Weights = dict[str, torch.Tensor]


def random_weights(seed: int = 0) -> Weights:
    """Tensors in ModelCenter's names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    def norm(name: str) -> Weights:
        return {f"{name}.weight": 1 + normal(DIM), f"{name}.bias": normal(DIM)}

    def linear(name: str, rows: int, columns: int) -> Weights:
        return {f"{name}.weight": normal(rows, columns), f"{name}.bias": normal(rows)}

    weights = {"input_embedding.weight": normal(VOCAB, DIM)}
    weights |= {
        f"{name}_embedding.weight": normal(POSITIONS, DIM)
        for name in ("position", "block_position")
    }
    for layer in range(LAYERS):
        prefix = f"encoder.layers.{layer}."
        weights |= norm(prefix + "self_att.layernorm_before_attention") | norm(
            prefix + "ffn.layernorm_before_ffn"
        )
        for name in ("project_q", "project_k", "project_v", "attention_out"):
            weights |= linear(f"{prefix}self_att.self_attention.{name}", DIM, DIM)
        weights |= linear(prefix + "ffn.ffn.w_in.w", FF, DIM) | linear(
            prefix + "ffn.ffn.w_out", DIM, FF
        )
    return weights | norm("encoder.output_layernorm")


def reference_places(ids: list[int], sep: int, valid: list[bool]) -> tuple[list[int], list[int]]:
    """Positions and block positions of one row, by walking along it."""
    counted, count = [], 0
    for is_valid in valid:
        count += is_valid
        counted.append(max(count - 1, 0))
    blanks = [counted[place] for place in range(sep) if ids[place] == MASK]
    places, inner, span, begin = [], [], -1, sep
    for place, token in enumerate(ids):
        if place < sep:
            places.append(counted[place])
            inner.append(0)
            continue
        if token == START:
            span, begin = span + 1, place
        places.append(blanks[max(span, 0)] if blanks else counted[max(sep - 1, 0)])
        inner.append(place - begin + 1)
    return places, inner


def reference(
    weights: Weights,
    ids: torch.Tensor,
    sep: list[int] | None = None,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores (batch, seq, vocab) of the model."""
    rows = []
    for number, row in enumerate(ids.tolist()):
        there = [True] * len(row) if valid is None else valid[number].bool().tolist()
        end = (row.index(START) if START in row else len(row)) if sep is None else sep[number]
        rows.append(reference_row(weights, row, end, there))
    return torch.stack(rows)


def reference_row(weights: Weights, ids: list[int], sep: int, valid: list[bool]) -> torch.Tensor:
    places, inner = reference_places(ids, sep, valid)
    hidden = (
        weights["input_embedding.weight"][ids]
        + weights["position_embedding.weight"][places]
        + weights["block_position_embedding.weight"][inner]
    )
    for layer in range(LAYERS):
        prefix = f"encoder.layers.{layer}."
        attention = prefix + "self_att.self_attention."
        normed = reference_norm(weights, prefix + "self_att.layernorm_before_attention", hidden)
        q, k, v = (
            reference_linear(weights, f"{attention}project_{name}", normed) for name in "qkv"
        )
        mixed = torch.stack(
            [reference_query(q[place], k, v, place, sep, valid) for place in range(len(ids))]
        )
        hidden = hidden + reference_linear(weights, attention + "attention_out", mixed)
        normed = reference_norm(weights, prefix + "ffn.layernorm_before_ffn", hidden)
        inside = reference_linear(weights, prefix + "ffn.ffn.w_in.w", normed)
        inside = inside * 0.5 * (1 + torch.erf(inside / math.sqrt(2)))
        hidden = hidden + reference_linear(weights, prefix + "ffn.ffn.w_out", inside)
    return (
        reference_norm(weights, "encoder.output_layernorm", hidden)
        @ weights["input_embedding.weight"].T
    )


def reference_query(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: int, sep: int, valid: list[bool]
) -> torch.Tensor:
    """What one token makes of those that it sees: valid ones, of the context or not behind it."""
    seen = [other for other in range(len(k)) if valid[other] and (other < sep or other <= place)]
    if not seen:  # a padding token in front, which nobody looks at
        return torch.zeros_like(q)
    heads = []
    for channels in torch.arange(DIM).chunk(HEADS):
        scores = torch.stack([q[channels] @ k[other, channels] for other in seen]) / math.sqrt(
            DIM // HEADS
        )
        weights = scores.exp() / scores.exp().sum()
        heads.append(
            sum(weight * v[other, channels] for weight, other in zip(weights, seen, strict=True))
        )
    return torch.cat(heads)


def reference_linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


def reference_norm(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred
        / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        * weights[name + ".weight"]
        + weights[name + ".bias"]
    )


def write_folder(folder: pathlib.Path, weights: Weights) -> pathlib.Path:
    """A folder as ModelCenter writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save(weights, folder / "pytorch_model.pt")
    return folder


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_weights()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, weights: Weights) -> GLM:
    return GLM.from_pretrained(write_folder(tmp_path_factory.mktemp("glm"), weights)).eval()


def two_spans() -> torch.Tensor:
    """Two rows: two spans for two blanks, and one span for one of two."""
    ids = parity.token_ids(2, 14, high=50)
    ids[0, [2, 5]], ids[0, [8, 11]] = MASK, START
    ids[1, [0, 4]], ids[1, 6] = MASK, START
    return ids


def test_places_are_those_of_the_paper(model: GLM) -> None:
    """The example of its figure 2: x1 x2 [M] x4 [M], then [S] x5 x6 and [S] x3, each span at its
    blank.
    """
    ids = torch.tensor([[4, 5, MASK, 7, MASK, START, 6, START, 8, 9]])
    places, inner = model.places(ids, None, model.context_length(ids))
    assert places.tolist() == [[0, 1, 2, 3, 4, 2, 2, 4, 4, 4]]
    assert inner.tolist() == [[0, 0, 0, 0, 0, 1, 2, 1, 2, 3]]


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_places_and_scores(model: GLM, weights: Weights, side: str) -> None:
    ids, mask = two_spans(), parity.padding_mask(2, 14, side, 2)
    valid = parity.valid_of(mask, ids)
    with torch.no_grad():
        out = model(
            ids,
            attention_mask=mask,
            output_hidden_states=True,
            output_attentions=True,
            return_dict=True,
        )
        plain = model(ids, attention_mask=mask)
    expected = reference(weights, ids, valid=mask)
    parity.assert_close(plain[valid], expected[valid])
    parity.assert_close(out.logits[valid], expected[valid])
    assert len(out.hidden_states) == LAYERS + 1
    assert out.hidden_states[-1] is out.last_hidden_state
    sums = out.attentions[1].sum(-1)
    parity.assert_close(sums, torch.ones_like(sums))
    assert not out.attentions[0][0, :, 8, 9:].any()  # a span's start sees nothing behind it
    assert out.attentions[0][1, :, 3, 5].all()  # within the context all is seen


def test_given_positions_and_sep_are_what_would_be_found(model: GLM, weights: Weights) -> None:
    """Given ones replace those found, and `sep` moves the border of the context."""
    ids = two_spans()
    sep = model.context_length(ids)
    assert sep.tolist() == [8, 6]
    with torch.no_grad():
        expected = model(ids)
        places, inner = model.places(ids, None, sep)
        assert torch.equal(model(ids, places, inner, sep), expected)
        assert torch.equal(model(ids.int(), places), expected)
        parity.assert_close(model(ids, sep=torch.tensor([6, 6])), reference(weights, ids, [6, 6]))
        other = model(ids, places.flip(1), inner)
    assert not torch.allclose(other, expected)


def test_without_spans_all_is_context_and_without_blanks_spans_follow_it(
    model: GLM, weights: Weights
) -> None:
    ids = parity.token_ids(2, 9, high=50)
    with torch.no_grad():
        parity.assert_close(model(ids), reference(weights, ids))
        ids[:, 5] = START
        parity.assert_close(model(ids), reference(weights, ids))


def test_length_and_inputs_embeds(model: GLM) -> None:
    ids, length = two_spans(), torch.tensor([12, 14])
    mask = torch.arange(14) < length[:, None]
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)
        parity.assert_close(model(ids, length=length)[mask], expected[mask])
        sep = model.context_length(ids)
        places, inner = model.places(ids, mask, sep)
        embeds = model.input_embedding(ids)
        parity.assert_close(
            model(None, places, inner, sep, inputs_embeds=embeds, attention_mask=mask), expected
        )


def test_gradients_of_every_parameter(model: GLM, weights: Weights) -> None:
    ids, mask = two_spans(), parity.padding_mask(2, 14, "left", 2)
    valid = parity.valid_of(mask, ids)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    parity.loss_of(BaseModelOutput(logits=reference(leaves, ids, valid=mask)), valid).backward()
    model.zero_grad()
    parity.loss_of(model(ids, attention_mask=mask), valid).backward()
    found = dict(model.named_parameters())
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        grad = grad_of(leaf)
        parity.assert_close(
            grad_of(found[name]), grad, name, parity.TOLERANCE * max(1, grad.abs().max().item())
        )
    assert grad_of(leaves["block_position_embedding.weight"])[3].any()


@pytest.mark.parametrize("side", ["none", "left"])
def test_a_cache_gives_what_one_pass_gives(model: GLM, side: str) -> None:
    """The context and the first start token, then some tokens, then one by one, a new span among
    them.
    """
    ids = two_spans()
    ids[1, [8, 11]], ids[1, 6] = START, 3
    mask = parity.padding_mask(2, 14, side, 2)
    valid = parity.valid_of(mask, ids)
    sep = model.context_length(ids)
    places, inner = model.places(ids, mask, sep)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask)
        for options in ({}, {"sep": sep}):
            past, pieces = None, []
            for start, stop in ((0, 9), (9, 11), (11, 12), (12, 13), (13, 14)):
                out = model(
                    ids[:, start:stop],
                    places[:, :stop],
                    inner[:, :stop],
                    attention_mask=None if mask is None else mask[:, :stop],
                    past_key_values=past,
                    use_cache=True,
                    return_dict=True,
                    **options,
                )
                past = out.past_key_values
                pieces.append(out.logits)
            parity.assert_close(torch.cat(pieces, 1)[valid], whole[valid])


def test_generation_goes_on_with_the_last_span(model: GLM) -> None:
    """Greedy tokens are those of passes without a cache; padded prompts give what they give
    alone.
    """
    prompts = [[4, MASK, 5, 6, START], [7, 8, MASK]]
    for prompt in prompts:
        row = list(prompt) if START in prompt else [*prompt, START]
        with torch.no_grad():
            for _ in range(6):
                row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
        found = generate(
            model, torch.tensor([prompt]), max_new_tokens=6, eos_token_id=(), pad_token_id=0
        )
        assert found.sequences.tolist() == [row]
    longer, shorter = [9, 4, 3, MASK, 5, 6], [0, 0, 0, 7, 8, MASK]
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    both = generate(
        model,
        torch.tensor([longer, shorter]),
        mask,
        max_new_tokens=6,
        eos_token_id=(),
        pad_token_id=0,
    )
    for number, prompt in enumerate((longer, shorter[3:])):
        alone = generate(
            model, torch.tensor([prompt]), max_new_tokens=6, eos_token_id=(), pad_token_id=0
        )
        assert both.new_tokens[number].tolist() == alone.new_tokens[0].tolist()
    beams = generate(
        model,
        torch.tensor([longer]),
        max_new_tokens=6,
        num_beams=3,
        eos_token_id=(),
        pad_token_id=0,
    )
    scores = [log_likelihood(model, row, 7) for row in (beams.sequences[0], both.sequences[0])]
    assert scores[0] >= scores[1] - 1e-5
    with pytest.raises(InputError, match="give it to all or none"):
        generate(model, torch.tensor([[4, MASK, START], [4, MASK, 5]]), max_new_tokens=2)
    with pytest.raises(InputError, match="does not take the inputs sep"):
        generate(
            model, torch.tensor([[4, MASK]]), inputs={"sep": torch.tensor([1])}, max_new_tokens=2
        )


def log_likelihood(model: GLM, row: torch.Tensor, start: int) -> float:
    """Of the tokens from `start` on."""
    with torch.no_grad():
        scores = model(row[None])[0].log_softmax(-1)
    return sum(scores[place - 1, row[place]].item() for place in range(start, len(row)))


def test_files(model: GLM, weights: Weights, tmp_path: pathlib.Path) -> None:
    """Our folders, and those of THUDM: other names, query, key and value in one, tanh GELU, with
    and without a prefix.
    """
    model.save_pretrained(tmp_path / "own", format="model_center")
    again = GLM.from_pretrained(tmp_path / "own")
    parity.assert_same_parameters(again, model)
    assert again.config == model.config
    with pytest.raises(ConfigError, match=r"format='model_center'"):
        model.save_pretrained(tmp_path / "hf")
    for prefix in ("", "glm."):
        folder = tmp_path / f"theirs{prefix}"
        folder.mkdir()
        content = {
            "model_type": "glm",
            "hidden_size": DIM,
            "num_attention_heads": HEADS,
            "num_layers": LAYERS,
            "vocab_size": VOCAB,
            "max_sequence_length": POSITIONS - 1,
            "block_position_encoding": True,
            "relative_encoding": False,
            "spell_length": None,
            "output_dropout_prob": 0.0,
        }
        (folder / "config.json").write_text(json.dumps(content))
        wide = {name: tensor for name, tensor in weights.items() if ".ffn.ffn." not in name}
        for layer in range(LAYERS):
            ffn = f"encoder.layers.{layer}.ffn.ffn."
            wide |= {
                ffn + "w_in.w.weight": torch.ones(4 * DIM, DIM) / 9,
                ffn + "w_in.w.bias": torch.zeros(4 * DIM),
            }
            wide |= {
                ffn + "w_out.weight": torch.ones(DIM, 4 * DIM),
                ffn + "w_out.bias": torch.zeros(DIM),
            }
        save_file(published(wide, prefix), folder / "model.safetensors")
        read = GLM.from_pretrained(folder, dtype="float32")
        assert model_class(content) is GLM
        assert (read.config.ffn_activate_fn, read.config.dim_ff, read.config.position_size) == (
            "gelu_new",
            4 * DIM,
            POSITIONS,
        )
        for name, param in read.named_parameters():
            assert torch.equal(param, wide[name]), name
    with pytest.raises(ConfigError, match="another GLM"):
        GLMConfig.from_dict({"model_type": "glm", "hidden_size": 4096})


def published(ours: Weights, prefix: str) -> Weights:
    """Tensors under THUDM's names."""
    out = {
        "word_embeddings.weight": ours["input_embedding.weight"],
        "transformer.position_embeddings.weight": ours["position_embedding.weight"],
        "transformer.block_position_embeddings.weight": ours["block_position_embedding.weight"],
    }
    parts = {
        "attention.dense": "self_att.self_attention.attention_out",
        "input_layernorm": "self_att.layernorm_before_attention",
        "post_attention_layernorm": "ffn.layernorm_before_ffn",
        "mlp.dense_h_to_4h": "ffn.ffn.w_in.w",
        "mlp.dense_4h_to_h": "ffn.ffn.w_out",
    }
    for kind in ("weight", "bias"):
        out[f"transformer.final_layernorm.{kind}"] = ours[f"encoder.output_layernorm.{kind}"]
        for layer in range(LAYERS):
            theirs, own = f"transformer.layers.{layer}.", f"encoder.layers.{layer}."
            packed = [ours[f"{own}self_att.self_attention.project_{name}.{kind}"] for name in "qkv"]
            out[f"{theirs}attention.query_key_value.{kind}"] = torch.cat(packed)
            out |= {
                f"{theirs}{other}.{kind}": ours[f"{own}{part}.{kind}"]
                for other, part in parts.items()
            }
    return {prefix + name: tensor.contiguous() for name, tensor in out.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(model: GLM, dtype: torch.dtype) -> None:
    ids = two_spans()
    parity.assert_trains_in(dtype, model, {"input_ids": ids}, torch.ones_like(ids).bool())


def test_classification_head_and_deep_copy(
    model: GLM, weights: Weights, tmp_path: pathlib.Path
) -> None:
    """The head for classes is called `output_projection` in GLM."""
    ids = two_spans()
    assert torch.equal(copy.deepcopy(model)(ids), model(ids))
    folder = write_folder(tmp_path, weights)
    with pytest.warns(UserWarning, match=r"output_projection.weight: newly initialised"):
        other = GLM.from_pretrained(folder, cls_head=3).eval()
    out = other(ids, return_dict=True)
    parity.assert_close(out.logits, out.last_hidden_state @ other.output_projection.weight.T)
    assert out.logits.shape == (2, 14, 3)
    with pytest.raises(InputError, match="classes"):
        generate(other, ids)


def test_bad_arguments(model: GLM, weights: Weights, tmp_path: pathlib.Path) -> None:
    ids = two_spans()
    with pytest.raises(InputError, match=r"from 0 to 20"):
        model(parity.token_ids(1, 21, high=50))
    with pytest.raises(InputError, match="row 0 has 2 spans and 1"):
        model(torch.tensor([[4, MASK, 5, START, 6, START]]))
    first = model(ids[:, :9], use_cache=True, return_dict=True)
    for more in ({"use_cache": True}, {"output_attentions": True}, {"output_logits": False}):
        with pytest.raises(InputError, match="give return_dict=True"):
            model(ids, **more)
    with pytest.raises(InputError, match="position_ids and block_position_ids of all tokens"):
        model(ids[:, 9:], past_key_values=first.past_key_values)
    with pytest.raises(InputError, match="position_ids and block_position_ids"):
        model(inputs_embeds=torch.zeros(2, 3, DIM))
    with pytest.raises(InputError, match="expected 14 keys"):
        model(ids, attention_mask=torch.ones(2, 13))
    with pytest.raises(ConfigError, match=r"'sop_token_id' .nearest: 'sop_tok_id'"):
        GLMConfig.from_dict({"sop_token_id": 3})
    folder = write_folder(
        tmp_path, {name: tensor for name, tensor in weights.items() if "layers.1.ffn" not in name}
    )
    with pytest.raises(WeightsError, match=r"encoder.layers.1.ffn"):
        GLM.from_pretrained(folder)


def test_published_defaults() -> None:
    with torch.device("meta"):
        found = GLM(GLMConfig())
    shapes = {name: tuple(param.shape) for name, param in found.named_parameters()}
    assert shapes["input_embedding.weight"] == (50048, 1024)
    assert (
        shapes["position_embedding.weight"]
        == shapes["block_position_embedding.weight"]
        == (1025, 1024)
    )
    assert "output_projection.weight" not in shapes
