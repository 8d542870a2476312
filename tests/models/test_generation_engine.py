"""The engine: the cache changes nothing but the work, streaming gives what a whole run does, bad
arguments are told.
"""

from __future__ import annotations

import copy
import functools
import pathlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import parity
from tests.models.versions import since_5
from torch.utils._python_dispatch import TorchDispatchMode

from model_center.errors import ConfigError, InputError
from model_center.generation.config import GenerationConfig
from model_center.generation.engine import generate, stream
from model_center.layer.cache import KeyValueCache, LayerCache
from model_center.model.bert import Bert, BertConfig
from model_center.model.cpm1 import CPM1, CPM1Config
from model_center.model.cpm2 import CPM2, CPM2Config
from model_center.model.cpm3 import CPM3, CPM3Config
from model_center.model.glm import GLM, GLMConfig
from model_center.model.gpt2 import GPT2, GPT2Config
from model_center.model.gptj import GPTj, GPTjConfig
from model_center.model.llama import Llama, LlamaConfig
from model_center.model.opt import OPT, OPTConfig
from model_center.model.t5 import T5, T5Config

VOCAB = 48
SIZES: dict[str, Any] = {"dim_model": 32, "num_heads": 4, "dim_head": 8, "dim_ff": 48}
LAYERS: dict[str, Any] = {"num_layers": 2}
BOTH: dict[str, Any] = {"num_encoder_layers": 2, "num_decoder_layers": 2}
CAUSAL: dict[str, Any] = {
    "gpt2": (GPT2, GPT2Config, LAYERS | {"position_size": 40}),
    "gptj": (GPTj, GPTjConfig, LAYERS | {"pos_rotary_dim": 4}),
    "opt": (OPT, OPTConfig, LAYERS | {"position_size": 40}),
    "llama": (Llama, LlamaConfig, LAYERS | {"num_heads_kv": 2, "sliding_window": 6}),
    "cpm1": (CPM1, CPM1Config, LAYERS),
    "cpm3": (
        CPM3,
        CPM3Config,
        LAYERS | {"prompt_types": 15, "prompt_length": 3, "segment_types": 4},
    ),
}
SEQ2SEQ: dict[str, Any] = {"t5": (T5, T5Config, BOTH), "cpm2": (CPM2, CPM2Config, BOTH)}


@functools.cache
def made(name: str, **overrides: Any) -> Any:
    """A small random model."""
    model_class, config, sizes = (CAUSAL | SEQ2SEQ)[name]
    torch.manual_seed(0)
    return parity.randomized(
        model_class(config(vocab_size=VOCAB, dtype="float32", **SIZES, **sizes, **overrides)),
        std=1.0,
    )


def uncached(model: Any, ids: torch.Tensor, num_new: int, **inputs: torch.Tensor) -> torch.Tensor:
    """Greedy search as it is defined: the whole sequence through the model for each token.

    `inputs` have a column per token.
    """
    prefix = ids.shape[1]
    with torch.no_grad():
        for _ in range(num_new):
            extra = {name: value[:, : ids.shape[1]] for name, value in inputs.items()}
            ids = torch.cat(
                [ids, parity.logits_of(model(input_ids=ids, **extra))[:, -1:].argmax(-1)], 1
            )
    return ids[:, prefix:]


@pytest.mark.parametrize("name", CAUSAL)
def test_cached_is_uncached(name: str) -> None:
    """Token for token, whatever the model's positions are; padding in front of a prompt makes no
    difference.
    """
    model, ids = made(name), parity.token_ids(4, 6, high=45)
    expected = uncached(model, ids, 12)
    assert len(set(expected.flatten().tolist())) > 4
    assert torch.equal(generate(model, ids, max_new_tokens=12).new_tokens, expected)
    start = 3 if name == "cpm3" else 0  # whose first ids are those of the prompt, in every row
    padded = torch.cat([ids[:, :start], torch.full((4, 5), 2), ids[:, start:]], 1)
    mask = torch.ones_like(padded)
    mask[:, start : start + 5] = 0
    padded, mask = torch.cat([padded, padded.flip(1)]), torch.cat([mask, torch.ones_like(mask)])
    found = generate(model, padded, mask, max_new_tokens=12).new_tokens
    assert torch.equal(found[:4], expected)
    assert torch.equal(found[4:], uncached(model, padded[4:], 12))


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_cached_is_uncached_with_an_encoder(name: str) -> None:
    model, ids = made(name), parity.token_ids(4, 6, high=VOCAB)
    decoded = torch.zeros(4, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(12):
            logits = model(input_ids=ids, decoder_input_ids=decoded).logits
            decoded = torch.cat([decoded, logits[:, -1:].argmax(-1)], 1)
    assert len(set(decoded.flatten().tolist())) > 4
    assert torch.equal(generate(model, ids, max_new_tokens=12).sequences, decoded)
    for side in ("left", "right"):
        wide = torch.full((4, 10), 2)
        columns = slice(4, 10) if side == "left" else slice(6)
        wide[:, columns], mask = ids, torch.zeros(4, 10)
        mask[:, columns] = 1
        assert torch.equal(generate(model, wide, mask, max_new_tokens=12).sequences, decoded)


def test_a_span_of_glm_goes_on() -> None:
    """Prompts get the token that starts a span; positions are those of one pass; padding makes no
    difference.
    """
    torch.manual_seed(0)
    special: dict[str, Any] = {"mask_tok_id": 40, "sop_tok_id": 41, "eop_tok_id": 42}
    config = GLMConfig(
        vocab_size=VOCAB, num_layers=2, position_size=40, dtype="float32", **SIZES, **special
    )
    model = parity.randomized(GLM(config), std=0.3)
    ids = parity.token_ids(3, 6, high=40)
    ids[:, 3] = 40
    started = torch.cat([ids, torch.full((3, 1), 41)], 1)
    expected = uncached(model, started, 8)
    for prompt in (ids, started):
        out = generate(model, prompt, max_new_tokens=8, forbidden_tokens=[41])
        assert torch.equal(out.new_tokens, expected) and torch.equal(out.sequences[:, :7], started)
    padded = torch.cat([torch.full((3, 4), 2), ids], 1)
    mask = (torch.arange(10) >= 4).expand(3, 10)
    assert torch.equal(generate(model, padded, mask, max_new_tokens=8).new_tokens, expected)
    beams = generate(model, padded, mask, max_new_tokens=8, num_beams=3)
    assert torch.equal(
        generate(model, ids, max_new_tokens=8, num_beams=3).new_tokens, beams.new_tokens
    )


def test_context_and_segments_go_on() -> None:
    """New tokens are no context of CPM-1, and of the last token's segment and span."""
    ids = parity.token_ids(3, 6, high=45)
    context = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0] * 6]).bool()
    whole = torch.cat([context, torch.zeros(3, 9, dtype=torch.bool)], 1)
    for name in ("cpm1", "cpm3"):
        found = generate(made(name), ids, max_new_tokens=9, inputs={"context": context}).new_tokens
        assert torch.equal(found, uncached(made(name), ids, 9, context=whole)), name
        assert not torch.equal(found, generate(made(name), ids, max_new_tokens=9).new_tokens), name
    segments = torch.tensor([[0, 0, 0, 1, 1, 2]] * 3)
    whole = torch.cat([segments, torch.full((3, 9), 2)], 1)
    found = generate(
        made("cpm3"), ids, max_new_tokens=9, inputs={"token_type_ids": segments}
    ).new_tokens
    assert torch.equal(found, uncached(made("cpm3"), ids, 9, token_type_ids=whole))
    spans = torch.tensor([[0, 0, 0, 1, 1, 1]] * 3)
    found = generate(made("cpm1"), ids, max_new_tokens=9, inputs={"span": spans}).new_tokens
    assert torch.equal(found, generate(made("cpm1"), ids[:, 3:], max_new_tokens=9).new_tokens)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_each_token_is_computed_once_in_memory_that_is_allocated_once(
    options: dict[str, Any],
) -> None:
    """One new token a pass; keys and values stay where they are, in room for the whole sequence,
    while beams change places.
    """
    model, ids = made("llama"), parity.token_ids(2, 6, high=VOCAB)
    widths, places, reordered = [], set(), []
    plain, reorder = LayerCache.append, KeyValueCache.reorder

    def append(self: LayerCache, keys: torch.Tensor, values: torch.Tensor) -> Any:
        widths.append(keys.shape[2])
        found = plain(self, keys, values)
        if self.length > 6:
            places.add((id(self), self[0].data_ptr(), self[0].untyped_storage().nbytes()))
        return found

    def counted(self: KeyValueCache, rows: torch.Tensor, start: int) -> None:
        reordered.append((rows.tolist(), start))
        reorder(self, rows, start)

    with (
        mock.patch.object(LayerCache, "append", append),
        mock.patch.object(KeyValueCache, "reorder", counted),
    ):
        generate(model, ids, max_new_tokens=10, **options)
    assert widths == [6, 6] + [1, 1] * 9
    rows = 2 * options.get("num_beams", 1)
    assert len(places) == 2 and {size for *_, size in places} == {rows * 2 * 16 * 8 * 4}
    assert len(reordered) == (9 if options else 0) and all(start == 6 for _, start in reordered)
    assert not options or any(
        moved != sorted(moved) or len(set(moved)) < rows for moved, _ in reordered
    )


def test_the_encoder_and_its_keys_are_computed_once() -> None:
    """For each prompt, not for each beam."""
    model, ids = made("t5"), parity.token_ids(2, 6, high=VOCAB)
    encoded, projected = [], []
    hooks = [
        model.encoder.register_forward_hook(lambda _, args, out: encoded.append(args[0].shape[:2])),
        *(
            layer.cross_att.self_attention.project_k.register_forward_hook(
                lambda _, args, out: projected.append(args[0].shape[:2])
            )
            for layer in model.decoder.layers
        ),
    ]
    generate(model, ids, max_new_tokens=8, num_beams=4)
    for hook in hooks:
        hook.remove()
    assert encoded == [(2, 6)] and projected == [(2, 6), (2, 6)]


def test_the_head_scores_only_last_tokens() -> None:
    model, ids = made("llama"), parity.token_ids(2, 30, high=VOCAB)
    with mock.patch.object(model, "logits", wraps=model.logits) as logits:
        generate(model, ids, max_new_tokens=4)
    assert [call.args[0].shape[1] for call in logits.call_args_list] == [1] * 4


class Looks(TorchDispatchMode):
    """Counts the operations that bring numbers of a tensor to Python, or sizes that depend on them:
    on a GPU each is a wait.
    """

    NAMES = (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::equal",
        "aten::masked_select",
        "aten::_unique2",
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in self.NAMES
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "cpm1"])
def test_no_look_at_the_device_for_a_token(name: str) -> None:
    """Greedily, drawn, by beams, with all filters, stop strings and padding; whether all rows have
    ended is copied to the host, and read there later.
    """
    tokenizer = mock.Mock(
        all_special_ids=[], get_vocab=lambda: {chr(65 + token): token for token in range(VOCAB)}
    )
    tokenizer.convert_tokens_to_string = "".join
    model, ids, counts = made(name), parity.token_ids(3, 6, high=VOCAB), {}
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    common: dict[str, Any] = {
        "eos_token_id": [1, 2],
        "min_new_tokens": 99,
        "repetition_penalty": 1.5,
        "forbidden_tokens": [3],
    }
    common |= {"stop_strings": "~~", "tokenizer": tokenizer, "return_scores": True}
    for search in (
        {},
        {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 2.0},
        {"num_beams": 3},
    ):
        for num_new in (5, 15):
            # On the CPU ids are compared with the size of the table, which looks at them.
            with mock.patch("model_center.layer.embedding.check_range"), Looks() as looks:
                generate(model, ids, mask, max_new_tokens=num_new, **common, **search)
            counts[num_new] = looks.count
        assert counts[15] - counts[5] == 0, search


@since_5  # 4 draws weights with which two beams are equal but for rounding
def test_one_row_is_that_row_of_a_batch() -> None:
    """Rows that have ended, or other beams, do not change the others."""
    ids = parity.token_ids(5, 6, high=VOCAB)
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"num_beams": 3, "early_stopping": True},
        {"num_beams": 2, "num_return_sequences": 2},
    )
    for name in ("gpt2", "t5"):
        model = copy.deepcopy(made(name)).double()  # in fp32 two beams are all but equal
        eos = int(generate(model, ids, max_new_tokens=9).new_tokens[0, 4])
        for options in ways:
            batch = generate(model, ids, max_new_tokens=9, eos_token_id=eos, **options).rows()
            alone = [
                generate(
                    model, ids[row : row + 1], max_new_tokens=9, eos_token_id=eos, **options
                ).rows()
                for row in range(5)
            ]
            assert batch == [row for rows in alone for row in rows]
            assert len(set(map(len, batch))) > 1 or options


def test_a_stream_gives_what_a_whole_run_gives() -> None:
    """Greedy and drawn; None after the end of a row; nothing is computed before it is asked for."""
    model, ids = made("gpt2"), parity.token_ids(4, 6, high=VOCAB)
    eos = int(generate(model, ids, max_new_tokens=9).new_tokens[0, 4])
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    )
    for options in ways:
        whole = generate(model, ids, max_new_tokens=9, eos_token_id=eos, **options).rows()
        steps = list(stream(model, ids, max_new_tokens=9, eos_token_id=eos, **options))
        assert [
            [token for token in row if token is not None] for row in zip(*steps, strict=True)
        ] == whole
        assert len(steps) == max(map(len, whole))
    assert any(None in step for step in steps)
    with mock.patch.object(model, "forward", wraps=model.forward) as forward:
        tokens: Iterator[Any] = stream(model, ids, max_new_tokens=9)
        assert forward.call_count == 0
        next(tokens)
        assert forward.call_count == 1
    with pytest.raises(ConfigError, match="num_beams is 2: beams are not streamed"):
        stream(model, ids, num_beams=2)


def test_modules_train_again_afterwards() -> None:
    """Dropout is off for the time; what was in evaluation mode before stays so; after an error and
    a stream left early too.
    """
    model = made("gpt2", dropout_p=0.5)
    ids = parity.token_ids(3, 6, high=VOCAB)
    expected = generate(model, ids, max_new_tokens=9).sequences
    model.train()
    model.encoder.layers[0].eval()
    before = [module.training for module in model.modules()]
    assert torch.equal(generate(model, ids, max_new_tokens=9).sequences, expected)
    assert [module.training for module in model.modules()] == before
    for _ in stream(model, ids, max_new_tokens=9):
        assert not model.training
        break
    assert [module.training for module in model.modules()] == before
    with (
        mock.patch.object(model, "logits", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError, match="memory"),
    ):
        generate(model, ids)
    assert [module.training for module in model.modules()] == before
    assert torch.is_grad_enabled()
    model.eval()


def test_no_prompts_give_no_rows() -> None:
    for options in ({}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True}):
        for name in ("gpt2", "t5", "cpm3"):
            out = generate(
                made(name), torch.zeros(0, 5, dtype=torch.long), max_new_tokens=4, **options
            )
            assert out.rows() == [] and len(out.sequences) == 0
    assert list(stream(made("gpt2"), torch.zeros(0, 5, dtype=torch.long))) == []


def test_other_dtypes() -> None:
    """bf16 weights, int32 ids, masks of numbers."""
    model, ids = made("llama", use_checkpoint=False), parity.token_ids(3, 6, high=VOCAB)
    expected = generate(model, ids, torch.ones(3, 6), max_new_tokens=5)
    assert torch.equal(
        generate(model, ids.int(), torch.ones(3, 6).bool(), max_new_tokens=5).sequences,
        expected.sequences,
    )
    half = made("llama").to(torch.bfloat16)
    made.cache_clear()
    out = generate(half, ids, max_new_tokens=5, num_beams=2, return_scores=True)
    assert (
        out.sequences.shape == (3, 11)
        and out.scores is not None
        and out.scores.dtype == torch.float32
    )


def test_the_default_number_of_new_tokens() -> None:
    """100, or as many as the model has positions for."""
    ids = parity.token_ids(1, 6, high=VOCAB)
    assert generate(made("llama"), ids).new_tokens.shape == (1, 100)
    assert generate(made("gpt2"), ids).sequences.shape == (1, 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_token": 3}, "'max_new_token' \\(nearest: 'max_new_tokens'\\)"),
        ({"temperatur": 3, "zzz": 1}, "'temperatur' \\(nearest: 'temperature'\\), 'zzz'"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0: expected a whole number, at least 1"),
        ({"max_new_tokens": 3, "max_length": 9}, "give one of them"),
        ({"max_length": 6}, "max_length is 6, and the prompt has 6 tokens"),
        ({"max_new_tokens": 35}, "the model has 40 positions; ask for at most 34 new tokens"),
        ({"num_beams": True}, "num_beams is True: expected a whole number"),
        ({"num_beams": 2.0}, "num_beams is 2.0"),
        ({"num_beams": 2, "do_sample": True}, "choose one of both"),
        ({"num_return_sequences": 2}, "expected at most as many as beams"),
        ({"num_beams": 2, "num_return_sequences": 3}, "expected at most as many as beams"),
        ({"temperature": 0.5}, "temperature: of no effect without do_sample=True"),
        ({"top_k": 5, "seed": 1}, "top_k, seed: of no effect"),
        ({"do_sample": True, "temperature": 0.0}, "temperature is 0.0: expected a number above 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "top_k": -1}, "top_k is -1"),
        ({"length_penalty": 2.0}, "length_penalty: of no effect without num_beams above 1"),
        ({"num_beams": 2, "early_stopping": "always"}, "expected True, False or 'never'"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_window": 4}, "repetition_window: of no effect without repetition_penalty"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"eos_token_id": -1}, "eos_token_id is -1: expected ids of tokens"),
        ({"eos_token_id": [3, "a"]}, "eos_token_id is \\[3, 'a'\\]"),
        ({"stop_strings": ["a", ""]}, "expected texts, not empty ones"),
    ],
)
def test_bad_configurations_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(made("gpt2"), parity.token_ids(2, 6, high=VOCAB), **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.zeros(2, 3)}, "input_ids is torch.float32 of shape \\(2, 3\\)"),
        (
            {"input_ids": torch.ones(3, dtype=torch.long)},
            "expected integers \\(batch, at least 1\\)",
        ),
        (
            {"input_ids": torch.ones(2, 0, dtype=torch.long)},
            "expected integers \\(batch, at least 1\\)",
        ),
        (
            {"input_ids": torch.tensor([[1, 48]])},
            "input_ids has the token 48: expected ids from 0 to 47",
        ),
        ({"input_ids": torch.tensor([[1, -3]])}, "input_ids has the token -3"),
        ({"eos_token_id": 50}, "eos_token_id has the token 50"),
        ({"forbidden_tokens": [1, 50]}, "forbidden_tokens has the token 50"),
        ({"pad_token_id": 50}, "pad_token_id has the token 50"),
        (
            {"attention_mask": torch.ones(2, 5)},
            "attention_mask has shape \\(2, 5\\): expected that of input_ids, \\(2, 6\\)",
        ),
        ({"attention_mask": torch.tensor([[1] * 6, [1] * 5 + [0]])}, "pad prompts on the left"),
        ({"attention_mask": torch.tensor([[1] * 6, [0] * 6])}, "prompt 1 has no token"),
        (
            {"inputs": {"context": torch.ones(2, 6)}},
            "GPT2 does not take the inputs context in generation: expected none",
        ),
        ({"stop_strings": "a"}, "give it as tokenizer="),
    ],
)
def test_bad_inputs_are_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((InputError, ConfigError), match=message):
        generate(made("gpt2"), **{"input_ids": parity.token_ids(2, 6, high=VOCAB)} | arguments)


def test_inputs_that_do_not_fit_a_model_are_told() -> None:
    ids = parity.token_ids(2, 6, high=45)
    with pytest.raises(
        InputError, match="context has shape \\(2, 5\\): expected that of input_ids"
    ):
        generate(made("cpm1"), ids, inputs={"context": torch.ones(2, 5)})
    with pytest.raises(InputError, match="the prompt has 3 tokens: expected at least 4"):
        generate(made("cpm3"), ids[:, :3])
    with pytest.raises(InputError, match="the first ids of input_ids, has 46: expected 0 to 44"):
        generate(made("cpm3"), torch.tensor([[1, 2, 44, 46], [0, 46, 3, 3]]))
    with pytest.raises(InputError, match="token_type_ids has 4: expected 0 to 3"):
        generate(made("cpm3"), ids.clamp(max=44), inputs={"token_type_ids": torch.full((2, 6), 4)})
    with pytest.raises(
        InputError, match="decoder_input_ids has shape \\(1, 2\\): expected \\(2, at least 1\\)"
    ):
        generate(made("t5"), ids, inputs={"decoder_input_ids": ids[:1, :2]})
    with pytest.raises(InputError, match="decoder_input_ids has the token 99"):
        generate(made("t5"), ids, inputs={"decoder_input_ids": torch.full((2, 1), 99)})
    with pytest.raises(InputError, match="3 classes"):
        generate(made("gpt2", cls_head=3), ids)
    bert = Bert(BertConfig(vocab_size=VOCAB, num_layers=1, dtype="float32", **SIZES))
    with pytest.raises(InputError, match="Bert does not generate text"):
        generate(bert, ids)


def test_a_configuration_is_a_value() -> None:
    """Options replace its values and leave it alone."""
    config = GenerationConfig(max_new_tokens=3, eos_token_id=[3, 4])
    assert config == GenerationConfig(max_new_tokens=3, eos_token_id=[3, 4])
    ids = parity.token_ids(2, 6, high=VOCAB)
    assert generate(made("gpt2"), ids, config=config, max_new_tokens=2).new_tokens.shape[1] == 2
    assert config.max_new_tokens == 3
    with pytest.raises(AttributeError):
        config.max_new_tokens = 5  # type: ignore[misc]


def test_weights_of_transformers_are_no_condition(tmp_path: pathlib.Path) -> None:
    """A model that was saved and read back generates the same."""
    model, ids = made("gpt2"), parity.token_ids(2, 6, high=VOCAB)
    model.save_pretrained(tmp_path, format="model_center")
    again = GPT2.from_pretrained(tmp_path, dtype="float32")
    assert torch.equal(
        generate(again, ids, max_new_tokens=5).sequences,
        generate(model, ids, max_new_tokens=5).sequences,
    )
