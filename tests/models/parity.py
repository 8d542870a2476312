"""Our models against those of transformers: the same random weights, the same inputs, the same
answers and gradients.
"""

import ast
import copy
import itertools
import warnings
from typing import TypeVar

import pytest
import torch
import transformers
from safetensors.torch import load_file

from model_center import model as models
from model_center.errors import ConfigError, InputError
from model_center.model import BaseModel, Longformer
from model_center.model.registry import model_class

TOLERANCE = 1e-5
SIDES = ("none", "left", "right")

Ours = TypeVar("Ours", bound=BaseModel)


def value_of(text):
    """A value written as in Python; a string needs no quotes."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def values(text):
    """Arguments written as `name=value`, separated by blanks."""
    pairs = (word.partition("=") for word in text.split())
    return {name: value_of(value) for name, _, value in pairs}


def randomized(model, std=0.2, seed=0):
    """The model in eval mode, every parameter drawn anew: weights around 0, those of norms (and
    only those are 1-d) around 1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator) * std
            param.copy_(noise + 1 if param.dim() == 1 and name.endswith("weight") else noise)
    return model.eval()


def theirs(model_class, config, std=0.2):
    """A random model of transformers whose attentions can be asked for."""
    config._attn_implementation = "eager"
    return randomized(model_class(config), std)


def loaded(model_class, model, folder, **overrides):
    """Our model of the weights that a model of transformers saves into this folder, in fp32 unless
    overridden.
    """
    model.save_pretrained(folder)
    ours = model_class.from_pretrained(folder, **{"dtype": "float32", **overrides})
    return ours.eval()


def their_model(words, std=0.2):
    """A random model of transformers: its class, and values of its configuration."""
    name, _, options = words.partition(" ")
    kind = getattr(transformers, name)
    return theirs(kind, kind.config_class(**values(options)), std)


def pair(words, folder):
    """Our model of the weights of a random one of theirs, and that one; heads may be new."""
    model = their_model(words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loaded(model_class(model.config.to_dict()), model, folder / "theirs"), model


def refuse(model, match, *args, **given):
    """The model refuses these inputs, with an InputError that says why."""
    with pytest.raises(InputError, match=match):
        model(*args, **given)


def refuse_configurations(lines):
    """A configuration refuses a content of config.json, with an error that says why: lines of
    "Bert vocab_size=3 ... | what it says"; "-" takes away what was given before.
    """
    for line in lines.strip().splitlines():
        words, _, match = line.partition(" | ")
        name, _, content = words.partition(" ")
        given = {key: value for key, value in values(content).items() if value != "-"}
        with pytest.raises(ConfigError, match=match):
            vars(models)[f"{name}Config"].from_dict(given)


def token_ids(*shape, high=60, low=3, seed=1):
    """Random token ids from `low` to `high` - 1: special ids are the lowest.

    The same on every device, on the default one.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, device="cpu").to(
        torch.get_default_device()
    )


def padding_mask(batch, length, side, num_padding=4):
    """int64 (batch, length), 0 for `num_padding` tokens on this side ("left" or "right") of the
    first row; None for "none".
    """
    if side == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, :num_padding] = 0
    return mask.flip(1) if side == "right" else mask


def valid_of(mask, like):
    """bool, the shape of ids or the first two dims of `like`: which tokens are not padding."""
    return torch.ones(like.shape[:2], dtype=torch.bool) if mask is None else mask.bool()


def scored(model, inputs):
    """The output of a model with its scores, which our Longformer returns only on request."""
    return model(**inputs, **({"return_logits": True} if isinstance(model, Longformer) else {}))


def logits_of(output):
    """The scores in an output, ours or theirs, or by themselves."""
    if isinstance(output, torch.Tensor):
        return output
    return output.prediction_logits if "prediction_logits" in output else output.logits


def assert_close(one, other, what="", tolerance=TOLERANCE):
    """The largest difference is within the tolerance; NaN and other shapes are failures."""
    assert one.shape == other.shape, f"{what}: shapes {tuple(one.shape)} and {tuple(other.shape)}"
    worst = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
    assert worst <= tolerance, f"{what}: {worst} apart"


def assert_same_logits(ours, model, inputs, valid):
    """Scores of the tokens `valid` (batch, seq), or with `valid` (batch,) of the samples."""
    with torch.no_grad():
        found, expected = logits_of(scored(ours, inputs)), logits_of(model(**inputs))
        assert_close(found[valid], expected[valid], "logits")


def loss_of(output, valid):
    """Cross entropy of the valid scores with random targets, summed so that no gradient is small
    beside the tolerance.
    """
    scores = logits_of(output)[valid]
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, scores.shape[-1], scores.shape[:1], generator=generator)
    return torch.nn.functional.cross_entropy(scores.float(), targets, reduction="sum")


def gradients(model, folder):
    """The gradients of a model under the names that its weights have in files: they are saved as if
    they were weights.

    Works for models of transformers and ours alike, so that ours come through the key map. Tensors
    of ours that are one in theirs (the norms of GPT-J) get their sum.
    """
    shadow = copy.deepcopy(model)
    with torch.no_grad():
        for param, source in zip(shadow.parameters(), model.parameters(), strict=True):
            param.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
        groups = {}
        for name, piece in (
            model.key_map(model.config).pieces.items() if isinstance(model, BaseModel) else ()
        ):
            groups.setdefault(piece, []).append(shadow.get_parameter(name))
        for group in groups.values():
            total = torch.stack(group).sum(0)
            for param in group:
                param.copy_(total)
    shadow.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same_gradients(ours, model, inputs, valid, folder, *, without=()):
    """The gradient of every parameter that theirs has, within the tolerance; `without` names
    beginnings of those that only they have, or that ours writes as a second name.
    """
    for one in (ours, model):
        one.zero_grad()
        loss_of(scored(one, inputs), valid).backward()
    beyond = tuple(without)
    found, expected = gradients(ours, folder / "ours"), gradients(model, folder / "gradients")
    expected = {name: grad for name, grad in expected.items() if not name.startswith(beyond)}
    assert expected.keys() <= found.keys()
    assert max(grad.abs().max().item() for grad in expected.values()) > 0.01, "nothing to compare"
    for name, grad in expected.items():
        largest = grad.abs().max().item()
        assert_close(found[name], grad, f"gradient of {name}", TOLERANCE * max(1.0, largest))
    for name in found.keys() - expected.keys():
        assert name.startswith(beyond) or not found[name].any(), f"{name}, which is ours alone"


def assert_same_extras(ours, model, inputs, valid):
    """Hidden states and attentions of all layers, of valid tokens; requesting them changes
    nothing. The last hidden state of an OPT with a narrow embedding is narrow in theirs alone.
    """
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        plain, found, expected = ours(**inputs), ours(**inputs, **wanted), model(**inputs, **wanted)
        *below, last = found.hidden_states
        states = (*below, getattr(ours, "project_out", torch.nn.Identity())(last))
    assert last is found.last_hidden_state
    assert_close(logits_of(found)[valid], logits_of(plain)[valid], "logits, with extras requested")
    for one, other in zip(states, expected.hidden_states, strict=True):
        assert_close(one[valid], other[valid], "hidden states")
    for one, other in zip(found.attentions, expected.attentions, strict=True):
        assert_close(one.transpose(1, 2)[valid], other.transpose(1, 2)[valid], "attentions")


def assert_saved_alike(ours, model, inputs, valid, folder, *, without=()):
    """What we save is bit-equal to what transformers saves, and transformers computes the same with
    it; we read it back, and ModelCenter's format too.

    `without` names beginnings of what only they have.
    """
    beyond = tuple(without)
    ours.save_pretrained(folder / "saved")
    model.save_pretrained(folder / "reference")
    found, expected = (
        load_file(folder / name / "model.safetensors") for name in ("saved", "reference")
    )
    for name, tensor in expected.items():
        assert name.startswith(beyond) or torch.equal(found[name], tensor), name
    read, ours.config.hugging_face = ours.config.hugging_face, None
    ours.save_pretrained(folder / "anew")  # the configuration too
    ours.config.hugging_face = read
    back, report = type(model).from_pretrained(
        folder / "anew", attn_implementation="eager", output_loading_info=True
    )
    assert all(name.startswith(beyond) for name in report["missing_keys"]), report
    assert_same_logits(model, back.eval(), inputs, valid)
    assert_own_format(ours, folder)
    again = type(ours).from_pretrained(folder / "saved", dtype="float32")
    assert again.config == ours.config
    assert_same_parameters(again, ours)


def assert_own_format(ours, folder):
    """Saved in ModelCenter's format, it comes back as it was."""
    ours.save_pretrained(folder / "own", format="model_center")
    again = type(ours).from_pretrained(folder / "own", dtype="float32")
    assert_same_parameters(again, ours)
    assert again.config == ours.config


def assert_same_parameters(one, other):
    """Both have the same names and bit-equal values."""
    found, expected = one.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_class_head(model_class, folder, inputs, name):
    """From a folder without it a head for classes is new, which a warning says; it scores every
    position, and trains with what is below.
    """
    with pytest.warns(UserWarning) as told:
        model = model_class.from_pretrained(folder, cls_head=3, dtype="float32").eval()
    texts = [str(warning.message) for warning in told]
    assert any(f"{name}.weight" in text and "newly initialised" in text for text in texts), texts
    head, scores = model.get_submodule(name), logits_of(scored(model, inputs))
    hidden = model(**inputs, return_dict=True).last_hidden_state
    by_hand = torch.nn.functional.linear(hidden, **dict(head.named_parameters()))
    assert_close(scores, by_hand, "scores of classes")
    assert scores.shape[-1] == 3 and head.weight.std() > 0.001
    scores.square().sum().backward()
    assert head.weight.grad.any() and model.input_embedding.weight.grad.any()


def in_pieces(model, ids, borders, of_all, *, name="input_ids", past=None, **others):
    """Scores of ids that go through a cache piece by piece, argument `name`.

    Args:
        of_all: arguments (batch, tokens so far), or of pairs of them.
        others: further arguments.
    """
    pieces = []
    with torch.no_grad():
        for start, stop in itertools.pairwise(borders):
            so_far = {
                key: x if x is None else x[:, :stop] if x.dim() == 2 else x[:, :stop, :stop]
                for key, x in of_all.items()
            }
            given = {name: ids[:, start:stop], **so_far, **others}
            out = model(**given, past_key_values=past, use_cache=True)
            past = out.past_key_values
            pieces.append(out.logits)
    return torch.cat(pieces, 1)


def assert_cache_agrees(ours, ids, split, mask=None):
    """A prefix with `use_cache`, a few tokens, and the rest token by token give what one pass
    gives.
    """
    given, borders = {"attention_mask": mask}, [0, split, *range(split + 2, ids.shape[1] + 1)]
    with torch.no_grad():
        whole = ours(input_ids=ids, **given).logits
    pieced, valid = in_pieces(ours, ids, borders, given), valid_of(mask, ids)
    assert_close(pieced[valid], whole[valid], "logits with a cache")


def assert_trains_in(dtype, ours, inputs, valid):
    """Forward and backward run in this dtype, every gradient is finite, and scores are near those
    of fp32.
    """
    half = type(ours)(type(ours.config)(**{**vars(ours.config), "dtype": dtype}))
    half.load_state_dict(ours.state_dict())
    half.eval()
    out = scored(half, inputs)
    assert logits_of(out).dtype == dtype
    with torch.no_grad():
        exact = logits_of(scored(ours, inputs))[valid]
    spread = (logits_of(out)[valid].float() - exact).norm() / exact.norm()
    assert spread < (0.1 if dtype == torch.bfloat16 else 0.02), f"{spread} apart"
    loss_of(out, valid).backward()
    for name, param in half.named_parameters():
        assert param.grad is None or param.grad.isfinite().all(), name
