"""Chat templates of others run within limits of time and memory, and write what they write."""

import copy
import resource
import sys
import time

import pytest
from tests.data_sets.common import tokenizer

from model_center.errors import InputError
from model_center.tokenizer.chat_template import rendered

LLAMA = tokenizer("llama")
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
MEMORY, TIME, POWER = "more than 64 MiB of memory", r"more than 0\.3 s", "a power"
GROWING = (
    "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = NEXT %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
        (
            "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
            TIME,
        ),
        ("{{ range(99999)|map('string')|map('center', 9999)|map('length')|sum }}", TIME),
        ("{{ 'a' * 10000000000 }}", MEMORY),
        ("{{ 'a'.ljust(10000000000) }}", MEMORY),
        ("{{ '%10000000000d' % 1 }}", MEMORY),
        (GROWING.replace("START", "'ab'").replace("NEXT", "ns.s ~ ns.s"), MEMORY),
        (GROWING.replace("START", "[1]").replace("NEXT", "ns.s + ns.s"), MEMORY),
        ("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", MEMORY),
        ("{{ 9**9**9 }}", POWER),
        ("{{ raise_exception('no talk') }}", "no talk"),
        ("{{ messages[7].content }}", "undefined|no element"),
    ],
)
def test_a_template_that_takes_too_much_is_refused(template, words):
    """Within seconds; the limits are those of before, and the next conversation is written."""
    reader = copy.copy(LLAMA)
    reader.chat_template = template
    before = resource.getrlimit(resource.RLIMIT_DATA), sys.gettrace()
    begin = time.process_time()
    with pytest.raises(InputError, match=f"refuses a conversation: .*({words})"):
        # A slow machine is to meet the limit of memory first.
        rendered(reader, TALK, seconds=0.3 if words == TIME else 5.0, num_bytes=64 << 20)
    assert time.process_time() - begin < 10
    assert before == (resource.getrlimit(resource.RLIMIT_DATA), sys.gettrace())
    assert rendered(reader, TALK, chat_template="{{ '2 ** 3' }}") == "2 ** 3"
    for answer in (False, True):
        want = LLAMA.apply_chat_template(TALK, tokenize=False, add_generation_prompt=answer)
        assert rendered(LLAMA, TALK, add_generation_prompt=answer) == want
