"""What waits for what on the streams of a device: stand-ins for them keep count, so that no GPU is
needed.
"""

import pytest
import torch

from bmtrain.distributed.transport import Streams

Tasks = frozenset[str]


class Stream:
    """One stream: its past is all that comes for certain before what is put there next."""

    device_index = 0

    def __init__(self, *_, priority=0):
        self.past = frozenset()

    def record_event(self):
        return self.past

    def wait_event(self, event):
        self.past |= event

    def wait_stream(self, other):
        self.past |= other.past


class Device:
    """Streams in which each task knows all tasks that come before it."""

    def __init__(self):
        self.current, self.before = Stream(), dict[str, Tasks]()

    def use(self, stream):
        self.current = stream

    def tasks(self, name, count):
        def issue(number):
            self.before[f"{name} {number}"] = self.current.past
            self.current.past |= {f"{name} {number}"}

        return [lambda number=number: issue(number) for number in range(count)]


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_stream", made.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.current)
    return made


def test_gathers_and_reductions_do_not_wait_for_each_other(device):
    """Nor do the copies of one of them; each direction in itself is in order. Reductions come after
    what was computed.
    """
    streams = Streams(torch.device("cuda", 0))
    device.tasks("product", 1)[0]()
    for turn in range(2):
        for name, way in (("gather", streams.gathering(None)), ("reduce", streams.reducing())):
            with way:
                streams.side_by_side(device.tasks(f"{name} {turn}:", 3))
                device.tasks(f"{name} {turn} done", 1)[0]()
    for own, other in (("gather", "reduce"), ("reduce", "gather")):
        for turn in range(2):
            copies = {f"{own} {turn}: {number}" for number in range(3)}
            for copy in copies:
                before = device.before[copy]
                assert not [name for name in before if name.startswith((other, f"{own} {turn}"))]
                assert turn == 0 or f"{own} 0 done 0" in before
                assert own == "gather" or "product 0" in before
            assert copies <= device.before[f"{own} {turn} done 0"]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_any_number_of_jobs(device, count):
    """More of them the second time, and fewer the third."""
    streams = Streams(torch.device("cuda", 0))
    for turn, now in enumerate((count, count + 4, count)):
        streams.side_by_side(device.tasks(f"{turn}:", now))
        device.tasks(f"end {turn}", 1)[0]()
        assert device.before[f"end {turn} 0"] >= {f"{turn}: {number}" for number in range(now)}
