"""Trains a tiny model, in which one rank meets with a fault: `program.py FAULT WATCHDOG`."""

import ctypes
import os
import signal
import sys
import tempfile
import time

import torch

import bmtrain as bmt
from bmtrain.distributed.ledger import Ledger
from bmtrain.runtime import world

STEPS, FAULTY_STEP = 6, 3


class Training:
    """A model of two blocks with its optimizer."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[bmt.Block(torch.nn.Linear(8, 8)) for _ in range(2)])
        self.optimizer = bmt.optim.AdamOptimizer(self.model.parameters(), lr=1e-3)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer)

    def step(self, number, *, skipping=False):
        """One step; its loss."""
        torch.manual_seed(number)
        self.manager.zero_grad()
        loss = self.model(torch.randn(4, 8, device=bmt.device())).square().mean()
        self.manager.backward(loss)
        if not skipping:
            self.manager.step()
        return bmt.sum_loss(loss.detach()).item()

    def save(self):
        """Collective, on the ranks that come."""
        with tempfile.TemporaryDirectory() as folder:
            bmt.save(self.model, f"{folder}/model.pt")


def fail():
    raise KeyError("the culprit")


def abort():
    ctypes.CDLL(None).abort()


def hold_lock():
    ctypes.PyDLL(None).sleep(600)  # PyDLL keeps Python's lock


FAULTS = {
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "abort": abort,
    "exception": fail,
    "exit": lambda: sys.exit(3),
    "sleep": lambda: time.sleep(600),
    "lock": hold_lock,
}


def train(fault, culprit, watchdog, *, is_immediate=True):
    """The program of one rank; ranks compare what they do before they do it if `is_immediate`."""
    bmt.init_distributed(device=os.environ.get("DEVICE"), timeout=60, watchdog=watchdog)
    if not is_immediate:
        world.current().service(Ledger).is_immediate = False
    training = Training()
    for number in range(STEPS):
        is_now = number == FAULTY_STEP and bmt.rank() == culprit
        if is_now and fault != "none":
            print(f"fault at {time.monotonic()}", flush=True)
        if is_now and fault in FAULTS:
            FAULTS[fault]()
        if is_now and fault in {"return", "batches"}:
            break
        if is_now and fault == "save":
            training.save()
        training.step(number, skipping=is_now and fault == "skip")
    if fault == "batches":
        bmt.synchronize()  # what comes after the loop


if __name__ == "__main__":
    train(sys.argv[1], culprit=1, watchdog=float(sys.argv[2]))
