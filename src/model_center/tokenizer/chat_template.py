"""Chat templates: programs that come with a model, run within limits of time and memory."""

from __future__ import annotations

import contextlib
import itertools
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from jinja2 import Environment, nodes

from model_center.errors import InputError

SECONDS = 20.0  # of processor time for one conversation; templates take milliseconds
NUM_BYTES = 512 << 20  # that one may take
_EVENTS = 64  # lines and calls between two looks at the clock
_CODE = "<template>"  # the file of jinja's code, as frames have it
_ONE_AT_A_TIME = threading.Lock()  # limits of memory are the process's


class _TooLong(Exception):
    pass


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    seconds: float = SECONDS,
    num_bytes: int = NUM_BYTES,
    **options: Any,
) -> str:
    """A conversation as one text: `apply_chat_template` of a tokenizer of transformers.

    A template is code of the publisher of the model. Transformers runs it in a sandbox, from which
    it cannot reach anything, but where it can loop and double a text without end. Memory is bounded
    on Linux.

    Args:
        tokenizer: with a chat template, unless it is in `options`.
        messages: the conversation.
        seconds, num_bytes: processor time and memory that the template may take.
        options: of `apply_chat_template`.

    Raises:
        InputError: for a conversation that the template refuses, and a template that takes more.
    """
    template = options.get("chat_template") or tokenizer.chat_template
    texts = template.values() if isinstance(template, Mapping) else [template]
    try:
        # the one operation that takes hours in a call of C, where nothing can end it
        if any("**" in text and _has_power(text) for text in texts):
            raise InputError("it has a power (**), which is not computed here")
        with _limits(seconds, num_bytes):
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
            return text
    except Exception as error:
        reason: object = error
        if isinstance(error, MemoryError):
            reason = f"it takes more than {num_bytes >> 20} MiB of memory"
        elif isinstance(error, _TooLong):
            reason = f"it takes more than {seconds:g} s"
        raise InputError(
            f"the chat template of {type(tokenizer).__name__} refuses a conversation: {reason}."
        ) from error


def _has_power(template: str) -> bool:
    syntax = Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    return syntax.parse(template).find(nodes.Pow) is not None


@contextlib.contextmanager
def _limits(seconds: float, num_bytes: int) -> Iterator[None]:
    """Inside, this thread has `seconds`, and the process takes `num_bytes` more at most."""
    events, end = itertools.count(1), time.thread_time() + seconds

    def at_line(frame: FrameType, event: str, argument: object) -> Any:
        if next(events) % _EVENTS == 0 and time.thread_time() > end:
            raise _TooLong
        return at_line

    def at_call(frame: FrameType, event: str, argument: object) -> Any:
        at_line(frame, event, argument)
        if frame.f_code.co_filename == _CODE:
            return at_line
        return None

    with _ONE_AT_A_TIME:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        traced = sys.gettrace()
        try:
            if sys.platform == "linux":
                with open("/proc/self/statm") as file:
                    pages = int(file.read().split()[5])  # of what this process may write
                most = pages * resource.getpagesize() + num_bytes
                limits = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
                resource.setrlimit(resource.RLIMIT_DATA, (min([most, *limits]), hard))
            sys.settrace(at_call)
            yield
        finally:
            sys.settrace(traced)
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
