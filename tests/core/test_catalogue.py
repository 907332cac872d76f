"""What a word stands for: names, options, and text read as the option's own type."""

from dataclasses import dataclass

import pytest

from shoal.codecs import CODECS
from shoal.core.catalogue import Catalogue, split_list
from shoal.strategies import BMUF, EASGD, STRATEGIES, Downpour, Local


@dataclass(frozen=True)
class Boat:
    masts: int = 1
    speed: float = 2.5
    leaky: bool = False
    crew: int | None = None
    depth: float | None = None
    name: str = "Nina"


BOATS = Catalogue("boat", {"boat": Boat, "barge": Boat})


def test_a_word_makes_its_thing_with_defaults_and_options():
    assert STRATEGIES.make("local") == Local()
    assert STRATEGIES.make("bmuf", period=7, momentum=0.5) == BMUF(period=7, momentum=0.5)
    assert STRATEGIES["easgd"] is EASGD


def test_an_unknown_word_names_the_nearest_and_lists_all():
    with pytest.raises(ValueError, match=r"unknown strategy 'bmfu'\. Did you mean 'bmuf'") as error:
        STRATEGIES.make("bmfu")
    assert all(word in str(error.value) for word in STRATEGIES)


def test_a_word_in_capitals_is_recognised_as_near():
    with pytest.raises(ValueError, match=r"unknown strategy 'DiLoCo'\. Did you mean 'diloco'"):
        STRATEGIES["DiLoCo"]


def test_a_word_like_no_other_only_lists_them():
    with pytest.raises(ValueError, match=r"^unknown codec 'zzz'\. Known: none, fp16") as error:
        CODECS.make("zzz")
    assert "Did you mean" not in str(error.value)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ValueError, match=r"strategy 'local' has no option 'periods'\. Did you mean 'period'"):
        STRATEGIES.make("local", periods=3)


def test_an_option_of_a_thing_without_options_says_so():
    with pytest.raises(ValueError, match=r"strategy 'sync' has no option 'period'\. Known: none\."):
        STRATEGIES.make("sync", period=3)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("masts", "3", 3),
        ("speed", "3", 3.0),
        ("speed", "1e-3", 0.001),
        ("leaky", "true", True),
        ("leaky", "Yes", True),
        ("leaky", "1", True),
        ("leaky", "FALSE", False),
        ("leaky", "no", False),
        ("leaky", "0", False),
        ("crew", "12", 12),
        ("crew", "none", None),
        ("crew", "auto", None),
        ("depth", "None", None),
        ("depth", "0.5", 0.5),
        ("name", "Santa Maria", "Santa Maria"),
        ("name", "none", "none"),
    ],
)
def test_text_is_read_as_the_option_s_own_type(option, text, value):
    got = getattr(BOATS.make("boat", **{option: text}), option)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("option", "text", "says"),
    [
        ("masts", "three", "boat 'boat': masts='three' should be a"),
        ("masts", "none", "masts='none'"),
        ("speed", "fast", "speed='fast' should be a number"),
        ("leaky", "maybe", "leaky='maybe' should be true or false"),
    ],
)
def test_text_that_is_not_of_the_type_is_refused(option, text, says):
    with pytest.raises(ValueError, match=says):
        BOATS.make("boat", **{option: text})


def test_a_fraction_where_a_whole_number_belongs_is_refused():
    with pytest.raises(ValueError, match=r"masts='2\.5'"):
        BOATS.make("boat", masts="2.5")


def test_values_that_are_not_text_are_taken_as_they_are():
    assert BOATS.make("boat", crew=None, leaky=True) == Boat(crew=None, leaky=True)


def test_what_the_thing_itself_refuses_comes_out():
    with pytest.raises(ValueError, match="period=0 must be at least 1"):
        STRATEGIES.make("local", period="0")
    with pytest.raises(ValueError, match="must be one of sgd, momentum, adagrad"):
        STRATEGIES.make("downpour", optimizer="adam")


def test_options_are_listed_with_their_defaults():
    options = STRATEGIES.options("downpour")
    assert (options["n_push"].default, options["optimizer"].default) == (1, None)
    assert options["n_push"].kinds == (int,)


def test_a_thing_knows_its_word():
    assert STRATEGIES.name_of(Downpour()) == "downpour"
    assert STRATEGIES.name_of(Boat()) == "Boat"


def test_a_catalogue_is_a_mapping():
    assert len(BOATS) == 2
    assert list(BOATS) == ["boat", "barge"]
    assert "boat" in BOATS
    assert "raft" not in BOATS


def test_options_may_follow_the_word():
    assert BOATS.read("boat") == Boat()
    assert BOATS.read("boat:masts=3,name=Pinta,crew=auto") == Boat(masts=3, name="Pinta")
    assert BOATS.read("boat:masts=3", name="Pinta") == Boat(masts=3, name="Pinta")
    with pytest.raises(ValueError, match="'boat:masts=3' has 'masts' already; say masts= once"):
        BOATS.read("boat:masts=3", masts=4)
    with pytest.raises(ValueError, match=r"boat 'boat' has no option 'mast'\. Did you mean 'masts'"):
        BOATS.read("boat:mast=3")


def test_words_of_a_list_keep_their_options():
    assert split_list("boat, barge") == ["boat", "barge"]
    assert split_list("barge,boat:masts=3,name=Pinta,barge,") == ["barge", "boat:masts=3,name=Pinta", "barge"]
    assert split_list("") == []
    assert split_list("boat,masts=3") == ["boat", "masts=3"]  # an option of what has none is an unknown word


@pytest.mark.parametrize("text", ["boat", "boat:masts=3", "boat:speed=0.5,leaky=True,crew=7,name=Pinta"])
def test_a_thing_is_written_as_it_is_read(text):
    assert BOATS.text_of(BOATS.read(text)) == text
    assert BOATS.text_of(object()) == "object"


def test_options_are_checked_without_making_the_thing():
    assert BOATS.check("boat", masts="3", crew="none", leaky=True) == {
        "masts": 3,
        "crew": None,
        "leaky": True,
    }
    with pytest.raises(ValueError, match=r"^strategy 'bmuf': momentum=1\.5 must be at least 0 and below 1$"):
        STRATEGIES.check("bmuf", momentum="1.5")
    with pytest.raises(ValueError, match=r"^codec 'top_k': density=2\.0 should be above 0"):
        CODECS.check_text("top_k:density=2")


def test_what_only_the_thing_itself_refuses_names_it_too():
    with pytest.raises(ValueError, match=r"^strategy 'bmuf': variant='mine' must be one of paper, cntk$"):
        STRATEGIES.make("bmuf", variant="mine")


def test_a_class_is_found_by_its_name():
    assert STRATEGIES.class_called("BMUF") is BMUF
    with pytest.raises(AttributeError, match="there is no strategy class 'BMFU'"):
        STRATEGIES.class_called("BMFU")
    with pytest.raises(ImportError, match="cannot import name 'BMFU'"):
        from shoal.strategies import BMFU  # noqa: F401


def test_a_class_of_the_same_name_is_not_taken_for_an_entry():
    other = dataclass(type("BMUF", (), {"__annotations__": {}}))
    assert STRATEGIES.name_of(BMUF()) == "bmuf"
    assert STRATEGIES.name_of(other()) == "BMUF"
