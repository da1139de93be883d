"""Compiled programs are kept between processes unless the user chose otherwise."""

import json
import os
import subprocess
import sys
from typing import Any

SCRIPT = """
import json, jax
jax.jit(lambda x: x + 1)(jax.numpy.ones(3))  # programs are kept after a first compilation, too
from treeflash_jax.engine.loading import keep_programs
keep_programs(by_jax=True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x * 3 + 1)(jax.numpy.ones(7)).block_until_ready()
print(json.dumps(jax.config.jax_compilation_cache_dir))
"""


def run(home, script: str = SCRIPT, **variables: str) -> Any:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"XDG_CACHE_HOME": str(home)}
    environment |= {"JAX_PLATFORMS": "cpu"} | variables
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_programs_are_kept_and_found_again(tmp_path):
    folder = tmp_path / "treeflash" / "programs"
    kept = []
    for _ in range(2):
        assert run(tmp_path) == str(folder)
        kept.append({path.name: path.stat().st_ino for path in folder.rglob("*-cache")})
    assert kept[0] == kept[1] != {}


def test_other_wishes_are_respected(tmp_path):
    assert run(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert run(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false") is None
    (tmp_path / "treeflash").write_text("")  # fails if a run above has made this folder, which now cannot be made
    assert run(tmp_path) is None


ON_TWO_DEVICES = """
import json, jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
import treeflash_jax as tf
from treeflash_jax.core import programs, sharding
from treeflash_jax.core.clock import Clock
from treeflash_jax.engine.loading import keep_programs

def double(x):
    return 2 * x

keep_programs()
programs.read_ahead()
mesh, clock = tf.make_mesh(2), Clock()
numbers = programs.call(jax.jit(double), sharding.place(jnp.arange(4), mesh), mesh=mesh, clock=clock)
print(json.dumps([numbers.tolist(), clock.compile_seconds > 0]))
"""


def test_executables_for_several_cpu_devices_are_not_kept(tmp_path):
    """One that was read back waits for ever in its collectives, and ends the process if it is read ahead for one device."""
    for _ in range(2):
        assert run(tmp_path, ON_TWO_DEVICES) == [[0, 2, 4, 6], True]
    assert not list((tmp_path / "treeflash" / "programs").iterdir())


READ_AHEAD = """
import json, os, time
from treeflash_jax.core import programs
from treeflash_jax.engine.loading import keep_programs

keep_programs()
for age, name in ((60, "earlier"), (1, "decode"), (2, "read")):
    path = programs.folder / f"{programs._environment()}-1-{name}"
    path.write_bytes(b"")
    os.utime(path, (time.time() - age,) * 2)
programs.read_ahead()
print(json.dumps([path.name.split("-")[-1] for path in programs._ahead]))
"""


def test_the_executables_of_the_last_answer_are_read_ahead_in_their_order(tmp_path):
    assert run(tmp_path, READ_AHEAD) == ["read", "decode"]


ANSWERS = """
import json, sys
import treeflash_jax as tf
from treeflash_jax.core import programs
from treeflash_jax.trees import BUILDERS

rehearse, rehearsed = programs._rehearse, []
programs._rehearse = lambda executable: rehearsed.append(rehearse(executable))
model = tf.load("tiny", drafter="none", dtype="float32")
first = model.generate("3 + 4", max_new_tokens=3)[0]
BUILDERS["mine"] = None  # code that no digest covers
programs.clear()
again = model.generate("3 + 4", max_new_tokens=3)[0]
print(json.dumps([first.ids, first.compile_seconds, again.compile_seconds, len(rehearsed)]))
"""


def test_a_second_process_runs_executables_of_the_first(tmp_path):
    """Nothing is traced or compiled again, except for damaged files and while users' own kinds are registered."""
    ids, seconds, again, rehearsed = run(tmp_path, ANSWERS)
    assert seconds > 0 and again > 0 and not rehearsed
    ids_again, seconds, _, rehearsed = run(tmp_path, ANSWERS)
    assert (ids_again, seconds, rehearsed) == (ids, 0, len(["make_keys", "begin", "read", "decode"]))
    paths = list((tmp_path / "treeflash" / "programs").iterdir())
    for path in paths:
        path.write_bytes(path.read_bytes()[:1000])
    bounded = ANSWERS.replace("first =", "programs.KEPT_FILES = 2\nfirst =", 1)
    after_damage, seconds, *_ = run(tmp_path, bounded)
    assert after_damage == ids and seconds > 0
    assert len(paths) > 2 == len(list((tmp_path / "treeflash" / "programs").iterdir())), "the latest are kept"
