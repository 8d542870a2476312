"""Our models against those of transformers: the same random weights, the same inputs, the same
answers and gradients.
"""

from __future__ import annotations

import copy
import itertools
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from model_center.model.base import BaseModel
from model_center.model.longformer import Longformer

TOLERANCE = 1e-5

Inputs = Mapping[str, Any]
Ours = TypeVar("Ours", bound=BaseModel)


def randomized(model: torch.nn.Module, std: float = 0.2, seed: int = 0) -> Any:
    """The model in eval mode, every parameter drawn anew: weights around 0, those of norms (and
    only those are 1-d) around 1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator) * std
            param.copy_(noise + 1 if param.dim() == 1 and name.endswith("weight") else noise)
    return model.eval()


def theirs(model_class: Any, config: Any, std: float = 0.2) -> Any:
    """A random model of transformers whose attentions can be asked for."""
    config._attn_implementation = "eager"
    return randomized(model_class(config), std)


def loaded(model_class: type[Ours], model: Any, folder: pathlib.Path, **overrides: Any) -> Ours:
    """Our model of the weights that a model of transformers saves into this folder, in fp32 unless
    overridden.
    """
    model.save_pretrained(folder)
    ours = model_class.from_pretrained(folder, **{"dtype": "float32", **overrides})
    return ours.eval()


def token_ids(*shape: int, high: int = 60, low: int = 3, seed: int = 1) -> torch.Tensor:
    """Random token ids from `low` to `high` - 1: special ids are the lowest.

    The same on every device, on the default one.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, device="cpu").to(
        torch.get_default_device()
    )


def padding_mask(batch: int, length: int, side: str, num_padding: int = 4) -> torch.Tensor | None:
    """int64 (batch, length), 0 for `num_padding` tokens on this side ("left" or "right") of the
    first row; None for "none".
    """
    if side == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, :num_padding] = 0
    return mask.flip(1) if side == "right" else mask


def valid_of(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """bool, the shape of ids or the first two dims of `like`: which tokens are none of the
    padding.
    """
    return torch.ones(like.shape[:2], dtype=torch.bool) if mask is None else mask.bool()


def scored(model: Any, inputs: Inputs) -> Any:
    """The output of a model with its scores, which our Longformer returns where it is asked to."""
    return model(**inputs, **({"return_logits": True} if isinstance(model, Longformer) else {}))


def logits_of(output: Any) -> torch.Tensor:
    """The scores in an output, ours or theirs, or by themselves."""
    if isinstance(output, torch.Tensor):
        return output
    return output.prediction_logits if "prediction_logits" in output else output.logits


def assert_close(
    one: torch.Tensor, other: torch.Tensor, what: str = "", tolerance: float = TOLERANCE
) -> None:
    """The largest difference is within the tolerance; NaN and other shapes are failures."""
    assert one.shape == other.shape, f"{what}: shapes {tuple(one.shape)} and {tuple(other.shape)}"
    worst = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
    assert worst <= tolerance, f"{what}: {worst} apart"


def assert_same_logits(
    ours: torch.nn.Module, model: torch.nn.Module, inputs: Inputs, valid: torch.Tensor
) -> None:
    """Scores of the tokens `valid` (batch, seq), or with `valid` (batch,) of the samples."""
    with torch.no_grad():
        assert_close(
            logits_of(scored(ours, inputs))[valid], logits_of(model(**inputs))[valid], "logits"
        )


def loss_of(output: Any, valid: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the valid scores with random targets, summed so that no gradient is small
    beside the tolerance.
    """
    scores = logits_of(output)[valid]
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, scores.shape[-1], scores.shape[:1], generator=generator)
    return torch.nn.functional.cross_entropy(scores.float(), targets, reduction="sum")


def gradients(model: Any, folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """The gradients of a model under the names that its weights have in files: they are saved as if
    they were weights.

    Works for models of transformers and ours alike, so that ours come through the key map.
    """
    shadow = copy.deepcopy(model)
    with torch.no_grad():
        for param, source in zip(shadow.parameters(), model.parameters(), strict=True):
            param.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    if isinstance(model, BaseModel):
        add_up_copies(shadow)
    shadow.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def add_up_copies(shadow: BaseModel) -> None:
    """Give gradients of tensors that are one tensor in theirs (the norms of GPT-J) their sum."""
    own = dict(shadow.named_parameters())
    groups: dict[Any, list[torch.Tensor]] = {}
    for name, piece in shadow.key_map(shadow.config).pieces.items():
        groups.setdefault(piece, []).append(own[name])
    with torch.no_grad():
        for group in groups.values():
            total = torch.stack(group).sum(0)
            for param in group:
                param.copy_(total)


def assert_same_gradients(
    ours: BaseModel,
    model: Any,
    inputs: Inputs,
    valid: torch.Tensor,
    folder: pathlib.Path,
    *,
    without: tuple[str, ...] = (),
) -> None:
    """The gradient of every parameter that theirs has, within the tolerance; `without` names
    beginnings of those that only they have, or that ours writes as a second name.
    """
    for one in (ours, model):
        one.zero_grad()
        loss_of(scored(one, inputs), valid).backward()
    found, expected = gradients(ours, folder / "ours"), gradients(model, folder / "theirs")
    expected = {name: grad for name, grad in expected.items() if not name.startswith(without)}
    assert expected.keys() <= found.keys(), (
        f"not among ours: {sorted(expected.keys() - found.keys())}"
    )
    largest = max(grad.abs().max().item() for grad in expected.values())
    assert largest > 0.01, f"the largest gradient is {largest}: nothing is compared"
    for name, grad in expected.items():
        assert_close(
            found[name], grad, f"gradient of {name}", TOLERANCE * max(1.0, grad.abs().max().item())
        )
    for name in found.keys() - expected.keys():
        second = name.startswith(without)
        assert second or not found[name].any(), (
            f"{name}, which theirs does not have, got a gradient"
        )


def assert_same_extras(
    ours: torch.nn.Module, model: torch.nn.Module, inputs: Inputs, valid: torch.Tensor
) -> None:
    """Hidden states and attentions of all layers, of valid tokens; asking for them changes
    nothing.
    """
    wanted = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        plain, found, expected = ours(**inputs), ours(**inputs, **wanted), model(**inputs, **wanted)
    assert_close(logits_of(found)[valid], logits_of(plain)[valid], "logits, with extras asked for")
    assert len(found.hidden_states) == len(expected.hidden_states)
    for layer, (one, other) in enumerate(
        zip(found.hidden_states, expected.hidden_states, strict=True)
    ):
        assert_close(one[valid], other[valid], f"hidden states {layer}")
    assert len(found.attentions) == len(expected.attentions)
    for layer, (one, other) in enumerate(zip(found.attentions, expected.attentions, strict=True)):
        assert_close(
            one.transpose(1, 2)[valid], other.transpose(1, 2)[valid], f"attentions {layer}"
        )


def assert_saved_alike(
    ours: BaseModel,
    model: Any,
    inputs: Inputs,
    valid: torch.Tensor,
    folder: pathlib.Path,
    *,
    without: tuple[str, ...] = (),
) -> None:
    """What we save is bit-equal to what transformers saved, and transformers computes the same with
    it.

    `without` names beginnings of what only they have.
    """
    ours.save_pretrained(folder / "saved")
    model.save_pretrained(folder / "reference")
    found, expected = (
        load_file(folder / "saved" / "model.safetensors"),
        load_file(folder / "reference" / "model.safetensors"),
    )
    for name, tensor in expected.items():
        assert name.startswith(without) or torch.equal(found[name], tensor), name
    back, report = type(model).from_pretrained(
        folder / "saved", attn_implementation="eager", output_loading_info=True
    )
    assert all(name.startswith(without) for name in report["missing_keys"]), report
    with torch.no_grad():
        assert torch.equal(
            logits_of(scored(back.eval(), inputs))[valid], logits_of(model(**inputs))[valid]
        )
    again = type(ours).from_pretrained(folder / "saved", dtype="float32")
    assert again.config == ours.config
    assert_same_parameters(again, ours)


def assert_same_parameters(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Both have the same names and bit-equal values."""
    found, expected = one.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_cache_agrees(
    ours: torch.nn.Module, ids: torch.Tensor, split: int, mask: torch.Tensor | None = None
) -> None:
    """A prefix with `use_cache`, a few tokens, and the rest token by token give what one pass
    gives.
    """
    valid = valid_of(mask, ids)

    def step(start: int, stop: int, past: Any) -> Any:
        until = {} if mask is None else {"attention_mask": mask[:, :stop]}
        return ours(input_ids=ids[:, start:stop], past_key_values=past, use_cache=True, **until)

    with torch.no_grad():
        whole = ours(input_ids=ids, **({} if mask is None else {"attention_mask": mask}))
        past, pieces = None, []
        borders = [0, split, split + 2, *range(split + 3, ids.shape[1] + 1)]
        for start, stop in itertools.pairwise(borders):
            out = step(start, stop, past)
            past = out.past_key_values
            pieces.append(out.logits)
    assert_close(torch.cat(pieces, 1)[valid], whole.logits[valid], "logits with a cache")


def assert_trains_in(
    dtype: torch.dtype, ours: BaseModel, inputs: Inputs, valid: torch.Tensor
) -> None:
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
