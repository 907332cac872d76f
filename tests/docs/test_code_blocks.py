"""Every code block of the documentation runs, or its page says why not. CONTRIBUTING.md has the rules.

`make test` has every command read; `make blocks` runs the quick blocks, `make soak` those that take minutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from acceptance import judge_of, refusal
from running import NEEDS, SETUPS, code, difference, fault, furnish

from pages import OUTPUT, ROOT, SHELL, Block, Page, chain, is_continued, page_at, pages

SECONDS, SOAK_SECONDS = 230, 3500

BLOCKS = [block for page in pages() for block in page.blocks]
UNRUN = {"checked", "shown"}


def cases() -> Iterator[ParameterSet]:
    for block in BLOCKS:
        if block.language not in OUTPUT and not UNRUN & block.words and not is_continued(block):
            marks = [pytest.mark.slow, pytest.mark.timeout(limit(block) + 10)]
            if "soak" in block.words:
                marks.append(pytest.mark.soak)
            yield pytest.param(block, id=str(block), marks=marks)


def limit(block: Block) -> int:
    """Seconds that it may take, on a machine that does much else."""
    return SOAK_SECONDS if "soak" in block.words else SECONDS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The current folder becomes one in which the blocks of a page run."""

    def make(page: Path, **options: bool) -> Path:
        furnish(tmp_path, page, **options)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    return make


@pytest.mark.blocks
@pytest.mark.parametrize("block", [*cases()])
def test_the_block_runs(block: Block, folder: Callable[..., Path], request: pytest.FixtureRequest):
    if "soak" not in block.words:
        request.getfixturevalue("warm_programs")
    run(block, folder)


@pytest.mark.soak
@pytest.mark.parametrize("block", [case for case in cases() if "soak" not in case.values[0].words])
def test_the_block_runs_in_new_interpreters(block: Block, folder: Callable[..., Path]):
    run(block, folder)


def run(block: Block, folder: Callable[..., Path]) -> None:
    for need in needs(block):
        if sentence := NEEDS[need]():
            pytest.skip(sentence)
    wrong = fault(block, folder(block.page), limit(block))
    assert not wrong, wrong


def needs(block: Block) -> list[str]:
    return block.names.get("needs", "").split()


# -- commands and code that do not run in this pass ------------------------------------------------

READ = [block for block in BLOCKS if block.language in SHELL and "shown" not in block.words]
PRESENT = [page for page in pages() if page.path.name != "CHANGELOG.md"]  # which tells of the past, too
INLINE = re.compile(r"(shoal (run|compare|reproduce) |make [a-z]+)(?!.*(…|\.\.\.|\b[A-Z]{2,}\b))")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("block", READ, ids=str)
def test_every_command_is_accepted(block: Block, folder: Callable[..., Path]):
    folder(block.page, to_read=True)
    for command in block.commands:
        ours = command.startswith("shoal ") or ("soak" in block.words and judge_of(command))
        if ours or "checked" in block.words:
            assert not (sentence := refusal(command)), f"{block}: {command}\n{sentence}"


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.path.name)
def test_commands_in_running_text_are_accepted(page: Page, folder: Callable[..., Path]):
    folder(page.path, to_read=True)
    for command in inline_commands(page):
        assert not (sentence := refusal(command)), f"{page.path.name}: {command}\n{sentence}"


def inline_commands(page: Page) -> list[str]:
    """Commands between backticks, unless something is left out of them."""
    spans = [child for token in page.tokens for child in token.children or []]
    return [s.content for s in spans if s.type == "code_inline" and INLINE.match(s.content)]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_is_python(block: Block):
    compile(block.text, str(block), "exec")


def test_the_difference_in_the_readme_is_that_of_the_examples():
    (shown,) = (block.text for block in page_at(ROOT / "README.md").blocks if block.language == "diff")
    plain, ours = (statements(ROOT / "examples" / f"mnist_{name}.py") for name in ("torch", "shoal"))
    added = [line for line in ours if line not in plain]
    gone = [line for line in plain if line not in ours]
    lines = [line for line in shown.splitlines() if line.strip("+-")]
    assert sorted(lines) == sorted([*(f"+{line}" for line in added), *(f"-{line}" for line in gone)])


def statements(path: Path) -> list[str]:
    return [line for line in path.read_text().split('"""')[2].splitlines() if line.strip()]


# -- that nothing is left out ----------------------------------------------------------------------


def test_every_block_has_a_language_and_every_marker_is_understood():
    assert not [fault for block in BLOCKS for fault in block.faults]


def test_every_marker_stands_before_a_block():
    for page in pages():
        marked = sum(bool(block.words) for block in page.blocks)
        assert marked == page.markers, f"{page.path.name}: a marker is not on the line before a block"


def test_every_name_in_a_marker_exists():
    for block in BLOCKS:
        assert set(needs(block)) <= NEEDS.keys(), f"{block} needs what no test knows"
    used = {block.names["after"] for block in BLOCKS if "after" in block.names}
    assert used == {path.stem for path in SETUPS.glob("*.py")}


def test_every_block_runs_or_says_why_not():
    run = {str(case.values[0]) for case in cases()}
    for block in BLOCKS:
        if block.language not in OUTPUT and str(block) not in run and not is_continued(block):
            assert UNRUN & block.words and block.reason, block


# -- controls: what the checks above must catch ----------------------------------------------------


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Page]:
    """A page with the given text, in a repository of its own."""
    monkeypatch.setattr("pages.ROOT", tmp_path)

    def write(text: str) -> Page:
        path = tmp_path / f"page{len(list(tmp_path.iterdir()))}.md"
        path.write_text(text)
        return Page(path)

    return write


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("```\nls\n```", "name the block's language"),
        ("<!-- docs: skip -->\n```bash\nls\n```", "unknown word 'skip'"),
        ("<!-- docs: shown -->\n```bash\nls\n```", "say in the marker why"),
        ("<!-- docs: file -->\n```python\n1\n```", "'file' needs a name"),
        ("<!-- docs: shown: never runs -->\n```text\n1\n```", "needs no marker but 'file'"),
    ],
)
def test_a_wrong_marker_is_caught(text: str, sentence: str, page: Callable[[str], Page]):
    (block,) = page(text).blocks
    assert sentence in "".join(block.faults)


def test_a_marker_is_read_in_a_list_and_with_a_reason_over_two_lines(page: Callable[[str], Page]):
    (block,) = page(
        "- a\n\n    <!-- docs: needs mnist jax, soak: two\n    lines -->\n    ```bash\n    ls\n    ```\n"
    ).blocks
    assert block.words == {"needs", "soak"}
    assert (block.names["needs"], block.reason.split()) == ("mnist jax", ["two", "lines"])
    assert block.commands == ["ls"]


def test_a_marker_before_nothing_is_counted(page: Callable[[str], Page]):
    lost = page("<!-- docs: soak -->\n\nText.\n\n```bash\nls\n```")
    assert lost.markers == 1 and not lost.blocks[0].words


def test_a_block_continues_the_one_before_it_in_its_language(page: Callable[[str], Page]):
    first, _, second = page(
        "```python\na = 1\n```\n```bash\nls\n```\n<!-- docs: continues -->\n```python\nassert a\n```"
    ).blocks
    assert chain(second) == [first, second] and is_continued(first) and not is_continued(second)
    assert code(second) == "a = 1\n\n\nassert a\n"


def test_commands_of_a_console_are_apart_from_their_output(page: Callable[[str], Page]):
    (block,) = page("```console\n$ shoal list \\\n      codecs\nnone\n$ ls\nfile\n```").blocks
    assert (block.commands, block.output) == (["shoal list codecs", "ls"], "none\nfile\n")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("```bash\nfor i in 1 2; do\n    echo $i  # twice\ndone\n```", None),
        ("```bash\nfalse\ntrue\n```", "ended with 1"),
        ("<!-- docs: exits 3 -->\n```bash\nexit 3\n```", None),
        ("<!-- docs: exits 3 -->\n```bash\ntrue\n```", "ended with 0"),
        ("<!-- docs: prints -->\n```console\n$ echo one\none\n```", None),
        ("<!-- docs: prints -->\n```console\n$ echo one\ntwo\n```", "prints something else"),
        ("<!-- docs: prints, exits 3 -->\n```console\n$ echo why >&2; exit 3\nwhy\n```", None),
        ("<!-- docs: prints -->\n```python\nprint(2)\n```\n```text\n3\n```", "prints something else"),
        ("```python\ndef test_it():\n    assert 0\n```", "AssertionError"),
    ],
)
def test_what_a_block_does_is_seen(
    text: str, sentence: str | None, page: Callable[[str], Page], tmp_path: Path
):
    found = fault(page(text).blocks[0], tmp_path, SECONDS)
    assert sentence in found if sentence and found else found is sentence


@pytest.mark.parametrize("printed", ["a 100 %\nend\n", "first\na  97.5 %\nend\n"])
def test_nearly_equal_output_passes(printed: str):
    assert difference("a 98.00 %\nend\n", printed) is None


@pytest.mark.parametrize("printed", ["a 70 %\nend\n", "b 98.00 %\nend\n", "end\n", "a 98.00 %\nend\nmore\n"])
def test_other_output_is_caught(printed: str):
    assert difference("a 98.00 %\nend\n", printed)


@pytest.mark.parametrize("shown", ["a\n…\n", "…\nc\n", "a\n…\nc\n", "a\n…\nb\n…\nc\n"])
def test_three_dots_stand_for_what_is_left_out(shown: str):
    assert difference(shown, "a b\nx y\nc\n") is None


@pytest.mark.parametrize("shown", ["b\n…\n", "a\n…\nd\n", "a\n…\nd\n…\nc\n", "a\n…\nc\n…\nc\n"])
def test_what_is_not_left_out_is_compared(shown: str):
    assert difference(shown, "a b\nx y\nc\n")


@pytest.mark.parametrize(
    "command",
    [
        "shoal compare --strategies bmfu",
        "shoal compare --strategy.perod 3",
        "shoal run -n 2 nowhere.py",
        "shoal list --nothing",
        "shoal tarin",
        "OMP_NUM_THREADS=1 python examples/branches.py --stpes 3",
        "python examples/nowhere.py",
        "mpiexec -n 2 shoal run --strategy bmfu train.py",
        "make tset",
    ],
)
@pytest.mark.slow
def test_a_wrong_command_is_refused(command: str, folder: Callable[..., Path]):
    folder(ROOT / "README.md")
    assert refusal(command)


def test_a_command_that_nobody_can_judge_is_not_passed_over():
    with pytest.raises(ValueError, match="without running it: rm"):
        refusal("rm -r build")
