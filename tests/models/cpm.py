"""The CPM models once more, as their catalogue describes them: loops over queries and keys,
explicit softmax, weights by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.models import parity

from model_center.model.outputs import BaseModelOutput

Seen = Callable[[int, int, int], bool | torch.Tensor]  # row, query, key
Bias = Callable[[int, int, int], torch.Tensor]  # row, query, key -> (heads,)
Shapes = dict[str, tuple[int, ...]]

VOCAB, DIM, HEADS, HEAD, WIDE, BUCKETS, FAR = 50, 24, 3, 5, 20, 8, 13
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "dim_model": DIM,
    "num_heads": HEADS,
    "dim_head": HEAD,
    "dim_ff": WIDE,
    "position_bias_num_buckets": BUCKETS,
    "position_bias_max_distance": FAR,
    "half": False,
}


def layer_shapes(prefix: str, *, cross: bool = False) -> Shapes:
    """Names and shapes of one layer's tensors in ModelCenter's files."""
    shapes: Shapes = {}
    for part in ("self_att", "cross_att") if cross else ("self_att",):
        shapes[f"{prefix}{part}.layernorm_before_attention.weight"] = (DIM,)
        for name in ("project_q", "project_k", "project_v"):
            shapes[f"{prefix}{part}.self_attention.{name}.weight"] = (HEADS * HEAD, DIM)
        shapes[f"{prefix}{part}.self_attention.attention_out.weight"] = (DIM, HEADS * HEAD)
    shapes[f"{prefix}ffn.layernorm_before_ffn.weight"] = (DIM,)
    shapes[f"{prefix}ffn.ffn.w_in.w_0.weight"] = shapes[f"{prefix}ffn.ffn.w_in.w_1.weight"] = (
        WIDE,
        DIM,
    )
    shapes[f"{prefix}ffn.ffn.w_out.weight"] = (DIM, WIDE)
    return shapes


def write_files(
    folder: pathlib.Path, shapes: Shapes, config: Mapping[str, Any], std: float
) -> dict[str, torch.Tensor]:
    """A folder of ModelCenter with random weights, which are returned in fp64 as leaves that take
    gradients.
    """
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * std + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(weights, folder / "pytorch_model.pt")
    return {name: tensor.double().requires_grad_() for name, tensor in weights.items()}


def bucket(distance: int, *, both_ways: bool) -> int:
    """The bucket of key position minus query position: exact ones near, wider and wider ones up to
    FAR.
    """
    count, first = BUCKETS, 0
    if both_ways:
        count //= 2
        first, distance = (count, distance) if distance > 0 else (0, -distance)
    else:
        distance = max(-distance, 0)
    exact = count // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(FAR / exact)
    return first + min(exact + int(share * (count - exact)), count - 1)


@dataclasses.dataclass(frozen=True)
class Reference:
    """The arithmetic, over weights by name."""

    weights: Mapping[str, torch.Tensor]
    length_scale: bool
    attn_scale: bool
    eps: float = 1e-6

    def rows(self, name: str, ids: torch.Tensor, *, scaled: bool) -> torch.Tensor:
        """Embeddings of ids (batch, seq)."""
        return self.weights[name][ids.long()] / (math.sqrt(DIM) if scaled else 1)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[name + ".weight"]
        return x @ weight.T / (math.sqrt(weight.shape[1]) if self.length_scale else 1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (
            x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weights[name + ".weight"]
        )

    def attention(
        self, x: torch.Tensor, keys_of: torch.Tensor, name: str, seen: Seen, bias: Bias | None
    ) -> torch.Tensor:
        batch, queries, num_keys = len(x), x.shape[1], keys_of.shape[1]
        q, k, v = (
            self.linear(of, f"{name}.project_{part}")
            for of, part in ((x, "q"), (keys_of, "k"), (keys_of, "v"))
        )
        rows = []
        for row in range(batch):
            for query in range(queries):
                heads = []
                for head in range(HEADS):
                    own = slice(head * HEAD, (head + 1) * HEAD)
                    shown = [key for key in range(num_keys) if seen(row, query, key)]
                    if not shown:
                        heads.append(q.new_zeros(HEAD))
                        continue
                    scores = []
                    for key in shown:
                        score = (q[row, query, own] * k[row, key, own]).sum() / (
                            math.sqrt(HEAD) if self.attn_scale else 1
                        )
                        scores.append(
                            score if bias is None else score + bias(row, query, key)[head]
                        )
                    powers = (torch.stack(scores) - max(scores).detach()).exp()
                    heads.append(
                        (
                            (powers / powers.sum())[:, None]
                            * torch.stack([v[row, key, own] for key in shown])
                        ).sum(0)
                    )
                rows.append(torch.cat(heads))
        return self.linear(torch.stack(rows).view(batch, queries, -1), f"{name}.attention_out")

    def ffn(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = self.linear(x, f"{name}.w_in.w_0")
        gelu = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
        return self.linear(gelu * self.linear(x, f"{name}.w_in.w_1"), f"{name}.w_out")

    def stack(
        self,
        x: torch.Tensor,
        name: str,
        depth: int,
        seen: Seen,
        bias: Bias,
        states: torch.Tensor | None = None,
        seen_states: Any = None,
    ) -> torch.Tensor:
        """All layers and the last norm; with `states`, decoder layers over those of an encoder."""
        for layer in range(depth):
            prefix = f"{name}.layers.{layer}."
            normed = self.norm(x, prefix + "self_att.layernorm_before_attention")
            x = x + self.attention(normed, normed, prefix + "self_att.self_attention", seen, bias)
            if states is not None:
                normed = self.norm(x, prefix + "cross_att.layernorm_before_attention")
                x = x + self.attention(
                    normed, states, prefix + "cross_att.self_attention", seen_states, None
                )
            x = x + self.ffn(self.norm(x, prefix + "ffn.layernorm_before_ffn"), prefix + "ffn.ffn")
        return self.norm(x, name + ".output_layernorm")


def assert_same_answers(
    ours: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    scores: torch.Tensor,
    expected: torch.Tensor,
    valid: torch.Tensor,
) -> None:
    """Scores of valid tokens, and the gradients of all weights of a loss of them."""
    parity.assert_close(scores[valid], expected[valid], "logits")
    for one in (scores, expected):
        parity.loss_of(BaseModelOutput(logits=one), valid).backward()
    own = dict(ours.named_parameters())
    assert own.keys() == weights.keys()
    for name, weight in weights.items():
        found, expected_grad = (
            torch.zeros_like(weight) if one.grad is None else one.grad
            for one in (own[name], weight)
        )
        parity.assert_close(
            found,
            expected_grad,
            f"gradient of {name}",
            1e-5 * max(1.0, expected_grad.abs().max().item()),
        )
