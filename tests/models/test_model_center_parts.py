"""Small parts that programs of ModelCenter make themselves: heads, dense maps, blocks, helpers."""

import pytest
import torch
import torch.nn.functional as F
from tests.models.parity import assert_close, randomized
from transformers import BertTokenizer

from model_center.errors import DataError, InputError
from model_center.layer.blocks import CrossAttentionBlock
from model_center.layer.embedding import Embedding
from model_center.layer.feedforward import DenseACT, DenseGatedACT
from model_center.model.bert import BertLMHead, BertPooler
from model_center.model.longformer import LongformerLMHead, LongformerPooler
from model_center.model.roberta import RobertaLMHead, RobertaPooler
from model_center.tokenizer import word_pieces
from model_center.tokenizer.by_identifier import BaseTokenizer
from model_center.tokenizer.cpm2 import CPM2Tokenizer
from model_center.tokenizer.word_pieces import WordpieceTokenizer

WIDTH, VOCAB, FLOAT = 8, 11, torch.float


def states(*shape):
    """Hidden states that want a gradient."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(*shape, generator=generator).requires_grad_()


def assert_same(module, found, expected, *inputs):
    """Values, and gradients of all parameters that have a part, and of the inputs."""
    assert_close(found, expected)
    leaves = [*inputs, *module.parameters()]
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    pairs = zip(
        *(
            torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
            for out in (found, expected)
        ),
        strict=True,
    )
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


def test_a_pooler_by_itself():
    assert LongformerPooler is RobertaPooler is BertPooler
    assert BertPooler(WIDTH).dense.weight.dtype == torch.half  # as every layer of ModelCenter
    pooler, x = randomized(BertPooler(WIDTH, FLOAT)), states(2, 3, WIDTH)
    dense = pooler.dense
    assert_same(pooler, pooler(x), (x[:, 0] @ dense.weight.T + dense.bias).tanh(), x)


def test_a_head_by_itself():
    """With a matrix of its own, or with an embedding's where it is given one."""
    kind = BertLMHead
    assert LongformerLMHead is RobertaLMHead is kind
    assert {x.dtype for x in kind(WIDTH, VOCAB, 1e-5).parameters()} == {torch.half}
    head, x = randomized(kind(WIDTH, VOCAB, 1e-3, FLOAT)), states(2, 3, WIDTH)
    table = randomized(Embedding(VOCAB, WIDTH, dtype=FLOAT))
    norm = dict(head.layer_norm.named_parameters())
    for given, weight in (((x,), head.decoder.weight), ((x, table), table.weight)):
        dense = F.gelu(x @ head.dense.weight.T + head.dense.bias)
        expected = F.layer_norm(dense, (WIDTH,), **norm, eps=1e-3) @ weight.T + head.decoder.bias
        assert_same(head, head(*given), expected, x, table.weight)
    with pytest.raises(InputError, match="got no embedding"):
        kind(WIDTH, VOCAB, 1e-5, FLOAT, tied=True)(x)


def test_dense_maps_by_themselves():
    """By position, in ModelCenter's order; products over the square root of their length."""
    x = states(2, 3, WIDTH)
    torch.manual_seed(0)
    plain = DenseACT(WIDTH, 5, "relu", FLOAT, False, 0.5, 0.25, True, True)
    weight, bias = plain.w.weight, plain.w.bias
    assert_same(plain, plain(x), F.relu(x @ weight.T / WIDTH**0.5 + bias), x)
    assert abs(weight.mean() - 0.5) < 0.2 and 0.15 < weight.std() < 0.35
    gated = DenseGatedACT(WIDTH, 5, dtype=FLOAT)
    expected = F.gelu(x @ gated.w_0.weight.T) * (x @ gated.w_1.weight.T)
    assert_same(gated, gated(x), expected, x)
    assert gated.w_0.bias is None and DenseGatedACT(WIDTH, 5).w_0.weight.dtype == torch.half


def test_cross_attention_with_its_norm_behind():
    """The residual is the normalised input."""
    sizes = {"dim_model": WIDTH, "num_heads": 2, "dim_head": 4, "dtype": FLOAT}
    x, other = states(2, 3, WIDTH), states(2, 4, WIDTH)
    before = randomized(CrossAttentionBlock(**sizes, norm_bias=True))
    behind = CrossAttentionBlock(**sizes, norm_bias=True, post_layer_norm=True)
    behind.load_state_dict(before.state_dict())
    normed = before.layernorm_before_attention(x)
    expected = before(x, other, torch.ones(2, 3, 4, dtype=torch.bool)) - x + normed
    assert_close(behind(x, other, torch.ones(2, 3, 4, dtype=torch.bool)), expected)


def test_words_in_pieces(tmp_path):
    """The longest known piece each time; what is not known, and long words, as the unknown one."""
    (tmp_path / "vocab.txt").write_text("<unk>\nab \na\nbc\n中文\na\n", encoding="utf-8")
    vocabulary = word_pieces.load_vocab(tmp_path / "vocab.txt")
    assert list(vocabulary.items()) == [("<unk>", 0), ("ab", 1), ("a", 5), ("bc", 3), ("中文", 4)]
    cut = WordpieceTokenizer(vocabulary).tokenize
    assert cut("abcabc中文x") == ["ab", "<unk>", "ab", "<unk>", "中文", "<unk>"]
    assert cut(b"abc") == ["ab", "<unk>"]
    short = WordpieceTokenizer(vocabulary, "?", 2)
    assert short.tokenize("ab") == ["ab"] and short.tokenize("aba") == ["?"]
    assert word_pieces.convert_to_unicode(b"a\xffb") == "ab"
    with pytest.raises(DataError, match="text is int"):
        word_pieces.convert_to_unicode(3)  # type: ignore[arg-type]
    assert word_pieces.is_contain_chinese("a中") and not word_pieces.is_contain_chinese("aé。")
    assert word_pieces.is_contain_point("a7") and not word_pieces.is_contain_point("a.七")


def test_sentinels_come_second(tmp_path):
    """As in ModelCenter's constructor."""
    tokens = ["<pad>", "<eod>", "<unk>", "</n>", "</_>", "<s>", "<s_0>", "<s_1>", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    tokenizer = CPM2Tokenizer(tmp_path / "vocab.txt", 2, 7, True)
    assert (tokenizer.max_sentinels, tokenizer.model_max_length, tokenizer.q2b) == (2, 7, True)
    assert tokenizer.get_sentinel_id(idx=1) == 7


def test_a_tokenizer_of_any_class(tmp_path):
    """By the name of a folder, with the arguments of its class."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nHello\n")
    load = BaseTokenizer(BertTokenizer).from_pretrained
    tokenizer = load(pretrained_model_name_or_path=tmp_path, do_lower_case=False)
    assert isinstance(tokenizer, BertTokenizer)
    assert tokenizer("Hello")["input_ids"] == [2, 5, 3]
