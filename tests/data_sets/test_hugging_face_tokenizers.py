"""The tokenizers that are transformers' own: the same ids as theirs, from every kind of folder, and
real classes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.children import ran
from tests.data_sets.common import FOLDERS, refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from model_center import tokenizer as ours

TEXTS = [
    "Anna was a baker.  Two spaces <extra_id_0> é ß 你好",
    "",
    "\n x\n",
    "It's 1 2 3 <s> </s> <|endoftext|>",
]
# Recorded from transformers 5.23: per family and kind of folder the ids of TEXTS, and more.
IDS = json.loads((FOLDERS.parent / "token_ids.json").read_text("utf-8"))
# In 4, a class has a twin in Python of this name, and some vocabularies are read otherwise.
library: Any = transformers
THEIRS_ARE_5 = library.BertTokenizer is library.BertTokenizerFast
# `tokenizers` before 0.19 cuts texts at blanks wherever it marks them, and says nothing of `split`.
SPLITS_ALWAYS = b"split" not in pre_tokenizers.Metaspace().__getstate__()
FAMILIES = {
    "bert": ("BertTokenizer", "vocab.txt"),
    "gpt2": ("GPT2Tokenizer", "vocab.json merges.txt"),
    "t5": ("T5Tokenizer", "spiece.model"),
    "llama": ("LlamaTokenizer", "tokenizer.model"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["tokenizer.json", "old files"])
def test_ids_are_those_of_transformers_5(tmp_path, family, kind):
    """For a folder of today and for one with nothing but the vocabulary, whichever version there
    is; a saved tokenizer is the same again.
    """
    name, files = FAMILIES[family]
    folder = FOLDERS / family
    if kind == "old files":
        folder = tmp_path
        copy(family, folder, *files.split())
    expected = IDS[family][kind]
    if THEIRS_ARE_5:
        options = {"add_bos_token": True} if family == "llama" and kind == "old files" else {}
        theirs = getattr(transformers, name).from_pretrained(folder, **options)
        assert told(theirs) == expected
        assert isinstance(getattr(ours, name).from_pretrained(folder), type(theirs))
    if family == "llama" and SPLITS_ALWAYS:
        with refused("does not know split"):
            getattr(ours, name).from_pretrained(folder)
        return
    tokenizer = getattr(ours, name).from_pretrained(folder)
    assert told(tokenizer) == expected
    assert isinstance(tokenizer, getattr(ours, name))
    assert isinstance(tokenizer, getattr(transformers, f"{name}Fast"))
    tokenizer.save_pretrained(tmp_path / "saved")
    assert told(getattr(ours, name).from_pretrained(tmp_path / "saved")) == expected


def told(tokenizer):
    """What `IDS` has of a tokenizer: version 4 counts the extra tokens among the special ones."""
    ids = [tokenizer.encode(text) for text in TEXTS]
    return {
        "ids": ids,
        "texts": [tokenizer.decode(numbers) for numbers in ids],
        "length": len(tokenizer),
        "special": {
            role: token
            for role, token in tokenizer.special_tokens_map.items()
            if role != "additional_special_tokens"
        },
    }


def test_files_that_the_installed_tokenizers_does_not_know_are_refused(tmp_path):
    """Merges that nothing can read; `ignore_merges`, which old versions read over in silence."""
    text, file = (
        (FOLDERS / "gpt2" / "tokenizer.json").read_text("utf-8"),
        tmp_path / "tokenizer.json",
    )
    for name, value in (("merges", 1), ("ignore_merges", True)):
        state = json.loads(text)
        state["model"][name] = value
        file.write_text(json.dumps(state))
        if (
            name != "ignore_merges"
            or name not in json.loads(Tokenizer(models.BPE()).to_str())["model"]
        ):
            with refused(rf"(cannot read .*tokenizer\.json|does not know {name})"):
                ours.GPT2Tokenizer.from_pretrained(tmp_path)
            continue
        tokenizer = ours.GPT2Tokenizer.from_pretrained(tmp_path)
        assert json.loads(tokenizer.backend_tokenizer.to_str())["model"]["ignore_merges"] is True


def test_the_other_byte_level_tokenizers_read_their_files(tmp_path):
    """Their `tokenizer.json` decides; in 5 RoBERTa's class adds `<s>` and `</s>` to it. OPT's
    published folder is GPT-2's old files, and a configuration that asks for a first token.
    """
    for name in ("GPTj", "OPT", "Roberta", "Longformer", "Qwen2"):
        expected = IDS["gpt2"]["tokenizer.json"]["ids"][0]
        if THEIRS_ARE_5:
            theirs = "Roberta" if name in ("Roberta", "Longformer") else "GPT2"
            kind = getattr(transformers, f"{theirs}Tokenizer")
            expected = kind.from_pretrained(FOLDERS / "gpt2").encode(TEXTS[0])
        own = getattr(ours, f"{name}Tokenizer").from_pretrained(FOLDERS / "gpt2")
        assert own.encode(TEXTS[0]) == expected
    copy("gpt2", tmp_path, "vocab.json", "merges.txt")
    configured(tmp_path, tokenizer_class="GPT2Tokenizer", add_bos_token=True)
    gpt2 = ours.GPT2Tokenizer.from_pretrained(FOLDERS / "gpt2")
    expected = [gpt2.bos_token_id, *gpt2.encode("Anna was")]
    assert ours.OPTTokenizer.from_pretrained(tmp_path).encode("Anna was") == expected


def copy(family, folder, *files):
    for file in files:
        shutil.copy(FOLDERS / family / file, folder)


def configured(folder, **values):
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def test_classes_can_be_constructed_and_saved(tmp_path):
    """From a vocabulary, which transformers 5 takes in memory and 4 in a file; transformers reads
    what they save.
    """
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"]
    file = tmp_path / "words.txt"
    file.write_text("\n".join(words))
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = ours.BertTokenizer(vocabulary if THEIRS_ARE_5 else str(file))
    assert tokenizer.encode("cat dog") == [2, 5, 1, 3]
    tokenizer.save_pretrained(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode("cat dog") == [2, 5, 1, 3]
    assert ours.BertTokenizer.from_pretrained(tmp_path).encode("cat dog") == [2, 5, 1, 3]


def test_llama_3_is_what_its_files_say(tmp_path):
    """A byte-level BPE under LLaMA's name: no SentencePiece blanks in it, and its own ids at the
    ends.
    """
    files = (str(FOLDERS / "gpt2" / name) for name in ("vocab.json", "merges.txt"))
    backend = Tokenizer(models.BPE.from_file(*files))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    ends = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
    configured(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **ends)
    tokenizer, text = ours.LlamaTokenizer.from_pretrained(tmp_path), "Anna was a baker."
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(text) == theirs.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.bos_token == "<|endoftext|>"


def test_llama_without_end_tokens_gets_its_own(tmp_path):
    """Meta's bare `tokenizer.model`: `<s>` in front, ids 1 and 2. Early conversions wrote "" for
    them.
    """
    copy("llama", tmp_path, "tokenizer.model")
    if SPLITS_ALWAYS:
        with refused("does not know split"):
            ours.LlamaTokenizer.from_pretrained(tmp_path)
        return
    for is_bare in (True, False):
        tokenizer = ours.LlamaTokenizer.from_pretrained(tmp_path)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
        if is_bare:
            assert tokenizer.tokenize("Anna", add_special_tokens=True)[0] == "<s>"
            assert isinstance(ours.MistralTokenizer.from_pretrained(tmp_path), ours.LlamaTokenizer)
        configured(tmp_path, bos_token="", eos_token="")


@pytest.mark.long
def test_jieba_is_silent(tmp_path):
    """No warning, which would be an error here, when it is compiled for the first time; no word
    about its dictionary.
    """
    file = Path(__file__).parents[2] / "src" / "model_center" / "tokenizer" / "segmenter.py"
    program = f"import runpy\nprint(runpy.run_path({str(file)!r})['words']('ab c'))"
    done = ran("-W", "error", "-c", program, PYTHONPYCACHEPREFIX=str(tmp_path))
    assert (done.stdout, done.stderr) == ("['ab', ' ', 'c']\n", "")
