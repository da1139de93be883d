"""Metrics for monitoring, in the form of Prometheus."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from treeflash_jax.engine.answers.results import Result

SECOND_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Metrics of one server. Their names begin with treeflash_."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.started = time.time()
        place = {"namespace": "treeflash", "registry": self.registry}
        self.requests = Counter("requests", "HTTP requests", ["path", "status"], **place)
        self.answers = Counter("answers", "finished answers", ["finished"], **place)
        self.prompt_tokens = Counter("prompt_tokens", "tokens of the prompts of finished answers", **place)
        self.reused_tokens = Counter("reused_tokens", "prompt tokens that were not read again", **place)
        self.tokens = Counter("tokens", "tokens of finished answers", **place)
        self.rounds = Counter("rounds", "rounds of finished answers", **place)
        self.accepted = Counter("accepted_tokens", "accepted drafted tokens, by depth in the tree", ["depth"], **place)
        self.tau = Gauge("tau", "mean number of tokens that a round added", **place)
        self.running = Gauge("running", "answers in slots: their prompt is being read, or they are being decoded", **place)
        self.waiting = Gauge("waiting", "answers that wait for a slot", **place)
        self.first_token = Histogram("first_token_seconds", "time to the first token", buckets=SECOND_BUCKETS, **place)
        self.gap = Histogram("gap_seconds", "time between two pieces of an answer", buckets=SECOND_BUCKETS, **place)
        self.between = Histogram("token_seconds", "mean time between tokens of an answer", buckets=SECOND_BUCKETS, **place)
        self._num_rounds, self._num_added = 0, 0

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Sets the functions that count running answers and waiting ones."""
        self.running.set_function(running)
        self.waiting.set_function(waiting)

    def observe(self, result: Result, seconds: float) -> None:
        """Counts a finished answer.

        Args:
          seconds: time since the answer's first token.
        """
        self.answers.labels(result.finished).inc()
        self.prompt_tokens.inc(len(result.prompt_ids))
        self.reused_tokens.inc(result.reused)
        self.tokens.inc(len(result.ids))
        self.rounds.inc(len(result.accept_lengths))
        for length in result.accepted_before_cut:
            for depth in range(1, length):  # leaves out the bonus token
                self.accepted.labels(depth).inc()
        self._num_rounds += len(result.accept_lengths)
        self._num_added += sum(result.accept_lengths)
        self.tau.set(self._num_added / max(1, self._num_rounds))
        if len(result.ids) > 1:
            self.between.observe(seconds / (len(result.ids) - 1))
