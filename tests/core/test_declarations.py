"""What is read from a source file is what the imported class or function says."""

from __future__ import annotations

import pytest

from shoal.codecs import CODECS
from shoal.core.declarations import NO_DEFAULT, Check, OwnOption, declared, read_checks, read_declaration
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES
from shoal.studies import STUDIES
from shoal.topologies import TOPOLOGIES

CATALOGUES = (STRATEGIES, CODECS, TASKS, STUDIES, TOPOLOGIES)
WORDS = [(catalogue, word) for catalogue in CATALOGUES for word in catalogue]


@pytest.mark.parametrize(("catalogue", "word"), WORDS, ids=[f"{c.kind} {word}" for c, word in WORDS])
def test_source_and_import_agree(catalogue, word):
    read, imported = catalogue.declaration(word), declared(catalogue[word])
    assert read.options == imported.options
    assert list(read.options) == list(imported.options)
    assert (read.doc, read.module, read.module_doc) == (imported.doc, imported.module, imported.module_doc)


@pytest.mark.parametrize("word", TASKS)
def test_the_settings_of_a_task_are_read_from_its_source(word):
    task, read = TASKS.make(word), TASKS.declaration(word).returned
    settings = ("name", "about", "batch", "lr")
    assert {name: read[name] for name in settings} == {name: getattr(task, name) for name in settings}


def test_checks_are_found_through_methods_and_base_classes():
    checks = read_checks("shoal.strategies.bmuf:BMUF")
    assert Check("shoal.core.limits", "between", (0, 1), {"momentum": OwnOption("momentum")}) in checks
    lengths = {"period": OwnOption("period"), "blocks": OwnOption("blocks")}
    assert Check("shoal.core.limits", "at_least", (1,), lengths) in checks  # in Blockwise.check_blocks
    inherited = read_checks("shoal.strategies.easgd:EAMSGD")  # super().__post_init__()
    assert Check("shoal.core.limits", "at_least", (1,), {"period": OwnOption("period")}) in inherited


def test_a_function_checks_nothing():
    assert read_checks("shoal.programs.tasks.speech:speech_csc") == ()


def test_an_imported_name_is_found_where_it_is_defined():
    assert read_declaration("shoal.strategies.downpour:Central").module == "shoal.vocabulary.strategy"


def test_an_option_without_default_has_none():
    assert read_declaration("shoal.core.limits:at_least").options["low"].default is NO_DEFAULT


@pytest.mark.parametrize(
    "target",
    ["shoal.strategies.bmuf:VARIANTS", "shoal.strategies.bmuf:Nothing", "shoal.nowhere:X", "torch:Tensor"],
)
def test_a_target_that_is_no_class_or_function_of_the_package_is_refused(target):
    with pytest.raises(ValueError, match="neither a class nor a function of this package"):
        read_declaration(target)
