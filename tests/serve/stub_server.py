"""A server without a model, whose work never ends: python stub_server.py answer|requests|schema|dispatch|error GRACE."""

import sys
import threading
import time
from types import SimpleNamespace

from stub_worker import StubRequestMaker

import treeflash_jax as tf
from treeflash_jax.constraints.compilation import Constraint, compile_constraint
from treeflash_jax.constraints.compile_bytes import Run
from treeflash_jax.engine.call.requests import Request
from treeflash_jax.engine.settings import pairs
from treeflash_jax.formats.tokenizer import Tokenizer
from treeflash_jax.serve import process
from treeflash_jax.serve.options import ServeOptions

WORK, GRACE = sys.argv[1], int(sys.argv[2])


class BusyRequestMaker(StubRequestMaker):
    def compile(self, constraint: Constraint, run: Run) -> None:
        tokenizer = Tokenizer.load(pairs.locate("tiny"))
        print("working", flush=True)
        compile_constraint(constraint, tokenizer, tokenizer.stop_ids, len(tokenizer.inner), run=run)

    def make_requests(self, prompts, **settings) -> list[Request]:
        print("working", flush=True)
        while WORK == "requests":
            pass
        return super().make_requests(prompts, **settings)


class BusyWorker(threading.Thread):
    def __init__(self, model, config, metrics, options):
        super().__init__(daemon=True)
        self.model, self.request_maker, self.error = model, BusyRequestMaker(), None
        self._stops, self._asked = threading.Event(), threading.Event()

    def run(self) -> None:
        if WORK == "error":
            self._asked.wait()
            time.sleep(0.5)
            self.error = RuntimeError("the device is lost")
        elif WORK == "dispatch":
            threading.Event().wait()
        else:
            self._stops.wait()

    def stop(self, seconds: float | None = None) -> bool:
        self._stops.set()
        self.join(seconds)
        return not self.is_alive()

    def check_room(self, count: int) -> None:
        pass

    def submit(self, submission) -> None:
        self._asked.set()

    def cancel(self, submission) -> None:
        pass


if __name__ == "__main__":
    process.Worker = BusyWorker
    model = SimpleNamespace(names=("stub",), tokenizer=None)
    sys.exit(process.serve(lambda: model, tf.GenerateConfig(), ServeOptions(port=0, grace=GRACE)))
