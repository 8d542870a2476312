"""The engine: the cache changes nothing but the work, streaming gives what a whole run does, bad
arguments are told.
"""

import ast
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models import parity, small
from torch.utils._python_dispatch import TorchDispatchMode

from model_center.errors import ConfigError, InputError
from model_center.generation.config import GenerationConfig
from model_center.generation.engine import generate, stream
from model_center.layer.cache import KeyValueCache, LayerCache
from model_center.model.seq2seq import Seq2SeqModel

VOCAB = 48
SIZES = f"vocab_size={VOCAB} dim_model=32 num_heads=4 dim_ff=48"
FAMILIES = {
    "gpt2": "GPT2 position_size=40",
    "gptj": "GPTj",
    "opt": "OPT position_size=40",
    "llama": "Llama num_heads_kv=2 sliding_window=6",
    "cpm1": "CPM1",
    "cpm3": "CPM3",
    "t5": "T5 num_encoder_layers=2",
    "cpm2": "CPM2 num_encoder_layers=2",
}


@functools.cache
def made(name, **overrides):
    """A small random model."""
    family, _, sizes = FAMILIES[name].partition(" ")
    return small.model(family, std=1.0, **parity.values(f"{SIZES} {sizes}") | overrides)


def prompt(rows=3, length=6, high=45):
    return parity.token_ids(rows, length, high=high)


def tokens_of(model, ids, *more, **options):
    """Greedy unless options say otherwise."""
    return generate(model, ids, *more, **{"max_new_tokens": 9} | options).new_tokens


def uncached(model, ids, num_new=9, **inputs):
    """Greedy search as it is defined: the whole sequence through the model for each token.

    `inputs` have a column per token.
    """
    encodes = isinstance(model, Seq2SeqModel)
    found = torch.zeros(len(ids), 1, dtype=torch.long) if encodes else ids
    prefix = found.shape[1]
    with torch.no_grad():
        for _ in range(num_new):
            given = {name: value[:, : found.shape[1]] for name, value in inputs.items()}
            given |= (
                {"input_ids": ids, "decoder_input_ids": found} if encodes else {"input_ids": found}
            )
            chosen = parity.logits_of(model(**given))[:, -1:].argmax(-1)
            found = torch.cat([found, chosen], 1)
    return found[:, prefix:]


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_is_uncached(name):
    """Token for token, whatever the model's positions are; padding, of an encoder on either side,
    makes no difference, nor does a row beside it.
    """
    model, ids = made(name), prompt(4)
    expected = uncached(model, ids, 12)
    assert len(set(expected.flatten().tolist())) > 4
    assert torch.equal(tokens_of(model, ids, max_new_tokens=12), expected)
    start = 3 if name == "cpm3" else 0  # whose first ids are those of the prompt, in every row
    for place in (start, 6) if name in ("t5", "cpm2") else (start,):
        padding = torch.full((4, 5), 2)
        padded = torch.cat([ids[:, :place], padding, ids[:, place:]], 1)
        mask = torch.ones_like(padded)
        mask[:, place : place + 5] = 0
        padded, mask = torch.cat([padded, padded.flip(1)]), torch.cat([mask, torch.ones_like(mask)])
        found = tokens_of(model, padded, mask, max_new_tokens=12)
        assert torch.equal(found, torch.cat([expected, uncached(model, padded[4:], 12)]))


def test_context_and_segments_go_on():
    """New tokens are no context of CPM-1, and of the last token's segment and span."""
    ids, cpm1, cpm3 = prompt(), made("cpm1"), made("cpm3")
    context = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0] * 6]).bool()
    segments = torch.tensor([[0, 0, 0, 1, 1, 2]] * 3)
    for model, name, given, new in (
        (cpm1, "context", context, context[:, :1] & False),
        (cpm3, "context", context, context[:, :1] & False),
        (cpm3, "token_type_ids", segments, segments[:, 5:]),
    ):
        found = tokens_of(model, ids, inputs={name: given})
        whole = {name: torch.cat([given, new.expand(3, 9)], 1)}
        assert torch.equal(found, uncached(model, ids, **whole)), name
        assert not torch.equal(found, tokens_of(model, ids)), name
    spans = torch.tensor([[0, 0, 0, 1, 1, 1]] * 3)
    assert torch.equal(tokens_of(cpm1, ids, inputs={"span": spans}), tokens_of(cpm1, ids[:, 3:]))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_each_token_is_computed_once_in_memory_that_is_allocated_once(num_beams):
    """One new token a pass, of which alone the head makes scores; keys and values stay where they
    are, in room for the whole sequence, while beams change places.
    """
    model, widths, places = made("llama"), [], set()
    plain = LayerCache.append

    def append(self, keys, values):
        widths.append(keys.shape[2])
        found = plain(self, keys, values)
        if self.length > 6:
            places.add((id(self), self[0].data_ptr(), self[0].untyped_storage().nbytes()))
        return found

    with (
        mock.patch.object(LayerCache, "append", append),
        mock.patch.object(KeyValueCache, "reorder") as reorder,
        mock.patch.object(model, "logits", wraps=model.logits) as logits,
    ):
        generate(model, prompt(2), max_new_tokens=10, num_beams=num_beams)
    assert widths == [6, 6] + [1, 1] * 9
    assert [call.args[0].shape[1] for call in logits.call_args_list] == [1] * 10
    assert [size for *_, size in places] == [2 * num_beams * 2 * 16 * 8 * 4] * 2
    assert [call.args[1] for call in reorder.call_args_list] == [6] * 9 * (num_beams > 1)


def test_the_encoder_and_its_keys_are_computed_once():
    """For each prompt, not for each beam."""
    model, seen = made("t5"), []
    parts = [layer.cross_att.self_attention.project_k for layer in model.decoder.layers]
    for part in (model.encoder, *parts):
        part.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[:2]))
    generate(model, prompt(2), max_new_tokens=8, num_beams=4)
    made.cache_clear()
    assert seen == [(2, 6)] * 3


class Looks(TorchDispatchMode):
    """Counts the operations that bring numbers of a tensor to Python, or sizes that depend on them:
    on a GPU each is a wait.
    """

    NAMES = "_local_scalar_dense nonzero equal masked_select _unique2"

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().removeprefix("aten::") in self.NAMES.split()
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "cpm1"])
def test_no_look_at_the_device_for_a_token(name):
    """Greedily, drawn, by beams, with all filters, stop strings and padding; whether all rows have
    ended is copied to the host, and read there later.
    """
    tokenizer = mock.Mock(
        all_special_ids=[], get_vocab=lambda: {chr(65 + token): token for token in range(VOCAB)}
    )
    tokenizer.convert_tokens_to_string = "".join
    model, ids = made(name), prompt()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"eos_token_id": [1, 2], "min_new_tokens": 99, "stop_strings": "~~"}
    options |= {"repetition_penalty": 1.5, "forbidden_tokens": [3], "return_scores": True}
    drawn = {"do_sample": True, "top_k": 9, "top_p": 0.9, "temperature": 2.0}
    for search in ({}, drawn, {"num_beams": 3}):
        counts = []
        for num_new in (5, 15):
            # On the CPU ids are compared with the size of the table, which looks at them.
            with mock.patch("model_center.layer.embedding.check_range"), Looks() as looks:
                tokens_of(
                    model,
                    ids,
                    mask,
                    max_new_tokens=num_new,
                    tokenizer=tokenizer,
                    **options,
                    **search,
                )
            counts.append(looks.count)
        assert counts[0] == counts[1], search


def test_asking_for_scores_changes_no_token():
    """Without them filters are left out where there are none."""
    model, ids = made("llama"), prompt()
    first = tokens_of(model, ids)[:, 0].tolist()
    for options in (
        {},
        {"eos_token_id": first},
        {"eos_token_id": first, "min_new_tokens": 5},
        {"forbidden_tokens": first},
        {"repetition_penalty": 1.5},
        {"do_sample": True, "seed": 1},
        {"num_beams": 2},
    ):
        found = [
            generate(model, ids, max_new_tokens=9, return_scores=on, **options)
            for on in (False, True)
        ]
        assert found[0].rows() == found[1].rows()
        assert found[0].scores is found[0].token_scores is None


def test_no_prompts_give_no_rows():
    for options in ({}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True}):
        for name in ("gpt2", "t5", "cpm3"):
            out = generate(made(name), prompt(0), **options)
            assert out.rows() == [] and len(out.sequences) == 0
    assert list(stream(made("gpt2"), prompt(0))) == []


def test_a_stream_gives_what_a_whole_run_gives():
    """Greedy and drawn; None after the end of a row; nothing is computed before it is asked for."""
    model, ids = made("gpt2"), prompt(4)
    eos = int(tokens_of(model, ids)[0, 4])
    for search in ({}, {"do_sample": True, "seed": 3, "num_return_sequences": 2}):
        options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": eos, **search}
        whole = generate(model, ids, **options).rows()
        steps = list(stream(model, ids, **options))
        columns = zip(*steps, strict=True)
        assert [[token for token in row if token is not None] for row in columns] == whole
        assert len(steps) == max(map(len, whole)) and any(None in step for step in steps)
    with mock.patch.object(model, "forward", wraps=model.forward) as forward:
        tokens = stream(model, ids, max_new_tokens=9)
        for count in range(3):
            assert forward.call_count == count
            next(tokens)
    with pytest.raises(ConfigError, match="num_beams is 2: beams are not streamed"):
        stream(model, ids, num_beams=2)


def test_modules_train_again_afterwards():
    """Dropout is off for the time; what was in evaluation mode before stays so; after an error and
    a stream left early too.
    """
    model, ids = made("gpt2", dropout_p=0.5), prompt()
    expected = tokens_of(model, ids)
    model.train()
    model.encoder.layers[0].eval()
    before = [module.training for module in model.modules()]
    for _ in range(2):
        assert torch.equal(tokens_of(model, ids), expected)
        assert [module.training for module in model.modules()] == before
        steps = stream(model, ids, max_new_tokens=9)
        assert next(steps) == expected[:, 0].tolist() and not model.training
        steps.close()  # type: ignore[attr-defined]
        assert [module.training for module in model.modules()] == before
        with (
            mock.patch.object(model, "logits", side_effect=RuntimeError("out of memory")),
            pytest.raises(RuntimeError, match="memory"),
        ):
            generate(model, ids)
        assert torch.is_grad_enabled()


def test_other_dtypes_and_the_default_number_of_new_tokens():
    """bf16 weights, int32 ids, masks of numbers; 100 tokens, or as many as there are positions."""
    model, ids = made("llama"), prompt()
    found = tokens_of(model, ids.int(), torch.ones(3, 6).bool())
    assert torch.equal(found, tokens_of(model, ids, torch.ones(3, 6)))
    out = generate(
        made("llama", dtype="bfloat16"), ids, max_new_tokens=5, num_beams=2, return_scores=True
    )
    assert out.sequences.shape == (3, 11) and out.scores is not None
    assert out.scores.dtype == torch.float32
    assert generate(model, ids[:1]).new_tokens.shape == (1, 100)
    assert generate(made("gpt2"), ids[:1]).sequences.shape == (1, 40)


# lists are tensors
BAD = r"""
gpt2 {'max_new_token': 3} 'max_new_token' \(nearest: 'max_new_tokens'\)
gpt2 {'temperatur': 3, 'zzz': 1} 'temperatur' \(nearest: 'temperature'\), 'zzz'
gpt2 {'max_new_tokens': 0} max_new_tokens is 0: expected a whole number, at least 1
gpt2 {'max_new_tokens': 3, 'max_length': 9} give one of them
gpt2 {'max_length': 6} max_length is 6, and the prompt has 6 tokens
gpt2 {'max_new_tokens': 35} the model has 40 positions; ask for at most 34 new tokens
gpt2 {'num_beams': True} num_beams is True: expected a whole number
gpt2 {'num_beams': 2.0} num_beams is 2.0
gpt2 {'num_beams': 2, 'do_sample': True} choose one
gpt2 {'num_return_sequences': 2} expected at most as many as beams
gpt2 {'num_beams': 2, 'num_return_sequences': 3} expected at most as many as beams
gpt2 {'temperature': 0.5} temperature: of no effect without do_sample=True
gpt2 {'top_k': 5, 'seed': 1} top_k, seed: of no effect
gpt2 {'do_sample': True, 'temperature': 0.0} temperature is 0.0: expected a number above 0
gpt2 {'do_sample': True, 'top_p': 1.5} top_p is 1.5
gpt2 {'do_sample': True, 'top_p': 0} top_p is 0
gpt2 {'do_sample': True, 'top_k': -1} top_k is -1
gpt2 {'length_penalty': 2.0} length_penalty: of no effect without num_beams above 1
gpt2 {'num_beams': 2, 'length_penalty': 'a'} length_penalty is 'a': expected a number
gpt2 {'num_beams': 2, 'early_stopping': 'always'} expected True, False or 'never'
gpt2 {'repetition_penalty': 0} repetition_penalty is 0
gpt2 {'repetition_window': 4} repetition_window: of no effect without repetition_penalty
gpt2 {'repetition_penalty': 2, 'repetition_window': 0} repetition_window is 0
gpt2 {'min_new_tokens': -1} min_new_tokens is -1
gpt2 {'eos_token_id': -1} eos_token_id is -1: expected ids of tokens
gpt2 {'eos_token_id': (3, 'a')} eos_token_id is \(3, 'a'\)
gpt2 {'pad_token_id': -1} pad_token_id is -1
gpt2 {'forbidden_tokens': (-1,)} forbidden_tokens is \(-1,\)
gpt2 {'stop_strings': ('a', '')} expected texts, not empty ones
gpt2 {'stop_strings': 'a'} give it as tokenizer=
gpt2 {'input_ids': [[0.0, 1.0]]} input_ids is torch.float32 of shape \(1, 2\)
gpt2 {'input_ids': [1, 1]} expected integers \(batch, at least 1\)
gpt2 {'input_ids': [[], []]} expected integers \(batch, at least 1\)
gpt2 {'input_ids': [[1, 48]]} input_ids has the token 48: expected ids from 0 to 47
gpt2 {'input_ids': [[1, -3]]} input_ids has the token -3
gpt2 {'eos_token_id': 50} eos_token_id has the token 50
gpt2 {'forbidden_tokens': (1, 50)} forbidden_tokens has the token 50
gpt2 {'pad_token_id': 50} pad_token_id has the token 50
gpt2 {'attention_mask': [[1]]} attention_mask has shape \(1, 1\): expected that of input_ids, \(2, 6\)
gpt2 {'attention_mask': [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]} pad prompts on the left
gpt2 {'attention_mask': [[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]} prompt 1 has no token
gpt2 {'context': [1]} GPT2 does not take the inputs context in generation: expected none
cpm1 {'context': [[1]]} context has shape \(1, 1\): expected that of input_ids
cpm3 {'input_ids': [[1, 2, 3]]} the prompt has 3 tokens: expected at least 4
cpm3 {'input_ids': [[1, 2, 44, 46], [0, 46, 3, 3]]} the first ids of input_ids, has 46: expected 0 to 44
cpm3 {'input_ids': [[1, 2, 3, 4]], 'token_type_ids': [[1, 2, 3, 4]]} token_type_ids has 4: expected 0 to 3
t5 {'decoder_input_ids': [[1, 2]]} decoder_input_ids has shape \(1, 2\): expected \(2, at least 1\)
t5 {'decoder_input_ids': [[99], [1]]} decoder_input_ids has the token 99
"""


def test_bad_arguments_are_told():
    """And change nothing of the next generation."""
    ids = prompt(2)
    expected = tokens_of(made("gpt2"), ids)
    for line in BAD.strip().splitlines():
        end = line.index("}") + 1
        name, _, arguments = line[:end].partition(" ")
        given = {"input_ids": ids, "inputs": {}}
        for key, value in ast.literal_eval(arguments).items():
            tensor = torch.tensor(value) if isinstance(value, list) else value
            is_input = key in ("context", "token_type_ids", "decoder_input_ids")
            (given["inputs"] if is_input else given)[key] = tensor
        with pytest.raises((InputError, ConfigError), match=line[end + 1 :]):
            generate(made(name), **given)
    with pytest.raises(InputError, match=r"of shape \(2, 0\): expected integers"):
        generate(made("gpt2"), ids[:, :0])
    with pytest.raises(ConfigError, match="the model has 40 positions, and the prompt has 40"):
        generate(made("gpt2"), prompt(1, 40))
    with pytest.raises(InputError, match="3 classes"):
        generate(made("gpt2", cls_head=3), ids)
    with pytest.raises(InputError, match="Bert does not generate text"):
        generate(small.model("Bert"), ids)
    # options replace values of a configuration and leave it alone
    config = GenerationConfig(max_new_tokens=9, eos_token_id=[3, 4])
    assert config == GenerationConfig(max_new_tokens=9, eos_token_id=[3, 4])
    found = tokens_of(made("gpt2"), ids, config=config, max_new_tokens=2)
    assert torch.equal(found, expected[:, :2])
    with pytest.raises(AttributeError):
        config.max_new_tokens = 5  # type: ignore[misc]
