"""Judging a program: whether its ranks compute what one process computes."""

import dataclasses
import pickle

from tests.programs import running
from tests.ranks import runner

from bmtrain.errors import BMTrainError

LIMIT_S = 30.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """right, refused, wrong, crash or hang; invalid where it fails in one process; and why."""

    word: str
    detail: str = ""

    @property
    def sort(self):
        """The same for faults that may be the same: of what a wrong number is, or the class of an
        exception.
        """
        words = self.detail.partition(": ")[2]
        if self.word == "wrong":
            return f"wrong {words.partition(', ')[2].split(' ')[0]}"
        return f"{self.word} {words.partition(':')[0]}"

    def __bool__(self):
        return self.word in ("right", "refused")


def judge(spec, limit=LIMIT_S):
    """Run a program on ranks that live on if it is right."""
    outcomes, _ = runner.perform(
        running.judge, spec.ranks, spec, timeout=limit, init=None, fresh=False
    )
    verdict = _verdict(outcomes, spec.ranks)
    if verdict.word != "right":  # what it has left behind is nobody else's business
        runner.POOL.close()
    return verdict


def _verdict(outcomes, ranks):
    said = {outcome.rank: _said(outcome) for outcome in outcomes}
    kinds = [kind for kind, _ in said.values()]
    first = {
        kind: next(f"rank {rank}: {text}" for rank, (k, text) in said.items() if k == kind)
        for kind in kinds
    }
    late = sorted(set(range(ranks)) - set(said))
    more = f" (ranks {late} did not end)" if late else ""
    for kind in ("invalid", "crash", "refused", "wrong"):
        if kind in first:
            word = "crash" if kind == "refused" and kinds.count(kind) < ranks else kind
            return Verdict(word, first[kind] + more)
    return Verdict("hang", more.strip()) if late else Verdict("right", first["right"])


def _said(outcome):
    if not outcome.trace:
        kind, text = pickle.loads(outcome.value)
        return str(kind), str(text)
    error = pickle.loads(outcome.error) if outcome.error else None
    if isinstance(error, BMTrainError):
        return "refused", f"{type(error).__name__}: {error}"
    last = outcome.trace.strip().splitlines()
    where = " < ".join(line.strip() for line in reversed(last) if line.startswith("  File "))
    return "crash", f"{last[-1][:300]} ({where[:600]})"
