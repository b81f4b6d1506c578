"""WebShop: the reward against cases worked out by hand, and against a judge that knows the catalogue."""

import itertools
import random

import pytest

pytest.importorskip("bm25s")

from nanoragen.envs.webshop import WebShop, score
from nanoragen.envs.webshop_catalogue import DEPARTMENTS, Goal, Product, generated

SHOE = Product(
    "B1", "Corva Waterproof Hiking Boots", "hiking boots", "Clothing › Hiking Boots", ("waterproof", "slim fit"),
    {"color": ("blue", "navy blue", "red"), "size": ("6", "6.5", "10")}, 49.99, "$49.99", "A pair of boots.", ("Fleece lined",),
)  # fmt: skip
GOAL = Goal(0, "Find me ...", ("waterproof", "slim fit"), (("color", "blue"), ("size", "6")))


def pay(bought=SHOE, color="blue", size="6", wanted=SHOE, limit=50.0, goal=GOAL):
    chosen = {k: v for k, v in (("color", color), ("size", size)) if v}
    return score(bought, chosen, wanted, goal, limit)


def like(product=SHOE, **changes):
    return Product(**{**vars(product), **changes})


# -- reward ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fifths, options",
    [  # of |attributes| + |options| + 1 = 5
        (5, {}),
        (5, {"color": "Blue"}),  # E20: how a value is spelt does not matter
        (5, {"color": " BLUE "}),
        (4, {"color": "red"}),
        (4, {"color": ""}),
        (4, {"color": "navy blue"}),  # the product does have blue itself
        (4, {"size": "6.5"}),
        (4, {"size": "10"}),
        (3, {"color": "", "size": ""}),
        (5, {"limit": 49.99}),
        (4, {"limit": 49.98}),
    ],
)
def test_e20_options_and_price(fifths, options):
    assert pay(**options) == fifths / 5


def test_e20_price_passes_up_to_the_limit():
    assert pay(like(price=49.99), limit=50.0) == 1.0
    assert pay(like(price=50.0), limit=50.0) == 1.0
    assert pay(like(price=50.01), limit=50.0) == 0.8


def test_values_that_are_near_count_where_there_is_nothing_nearer():
    snow = like(options={"color": ("powder snow", "red"), "size": ("large", "x-large"), "pack": ("pack of 6", "pack of 12")})

    def chose(name, value, wanted):
        return score(snow, {name: value}, snow, Goal(0, "", ("waterproof",), ((name, wanted),)), 1e9) == 1.0

    assert chose("color", "powder snow", "cool powder snow")  # WebShop's own example
    assert not chose("color", "red", "cool powder snow")
    assert chose("pack", "pack of 6", "packs of 6") and not chose("pack", "pack of 12", "pack of 6")
    assert not chose("pack", "pack of 6", "pack")
    assert not chose("size", "x-large", "large") and not chose("size", "large", "xx large")  # sizes are exact
    assert score(snow, {"size": "x-large"}, snow, Goal(0, "", ("waterproof",), (("", "large"),)), 1e9) == 2 / 3


def test_one_choice_does_not_meet_two_options():
    goal = Goal(0, "", ("waterproof",), (("color", "blue"), ("trim", "blue")))
    assert score(SHOE, {"color": "blue"}, SHOE, goal, 1e9) == 3 / 4


def test_what_nobody_asked_for_does_not_count():
    named = like(name="Corva Red Hiking Boots")
    assert pay(named, color="red", wanted=named) == 0.8  # there, a chosen value in the title counts as asked for


@pytest.mark.parametrize(
    "attribute, has",
    [
        ("waterproof", True),
        ("Water-Proof", False),
        ("WATERPROOF", True),
        ("slim fits", True),  # WebShop's fuzzy match: essential oil, essential oils
        ("fleece lined", True),  # said among the features
        ("boots", True),
        ("lined fleece", False),
        ("proof", False),
        ("fit slim", True),
        ("slim waterproof", False),
        ("", False),
        ("!!", False),
    ],
)
def test_attributes(attribute, has):
    assert score(SHOE, {}, SHOE, Goal(0, "", (attribute,), ()), 1e9) == (2 if has else 1) / 2


@pytest.mark.parametrize(
    "r_type, changes",
    [
        (1.0, {"name": "Pelo Hiking Boots"}),
        (1.0, {"name": "Boots", "kind": "x", "category": "x"}),  # 1/3 of the words of the name
        (0.0, {"name": "Pelo Slim Fit Waterproof Kettle"}),  # attributes are no reason to think it is the same thing
        (0.0, {"name": "Kettle", "category": "Clothing › Hiking Boots"}),
        (0.0, {"name": ""}),
    ],
)
def test_type_of_the_product(r_type, changes):
    assert pay(like(**changes)) == r_type * (4 + ("waterproof" in SHOE.attributes)) / 5


def test_type_where_the_names_share_little():
    long = like(name=" ".join(f"word{i}" for i in range(1, 21)))
    for shared, other, r_type in ((1, {}, 0.1), (2, {}, 1.0), (4, {}, 1.0), (5, {}, 1.0)):  # of 20 words; 0.1 is not < 0.1
        assert pay(like(name=" ".join(f"word{i}" for i in range(1, shared + 1)), **other), wanted=long) == r_type
    foreign = {"kind": "x", "category": "Home › Hiking Boots"}
    for shared, r_type in ((1, 0.1), (2, 0.5), (4, 0.5), (5, 1.0)):  # 0.2 is not > 0.2
        assert pay(like(name=" ".join(f"word{i}" for i in range(1, shared + 1)), **foreign), wanted=long) == r_type


def test_words_of_the_catalogue_cannot_be_confused():
    kinds = [k for _, kinds in DEPARTMENTS.values() for k in kinds]
    words = [w for k in kinds for w in k.split()]
    assert len(words) == len({w.rstrip("s") for w in words}) == 2 * len(kinds)
    attributes = {a for attributes, _ in DEPARTMENTS.values() for a in attributes}
    assert not {w for a in attributes for w in a.split()} & set(words)
    for a, b in itertools.permutations(attributes, 2):
        assert f" {a} " not in f" {b} "
    for p in generated(1000, 0).products:
        brand = p.name.split()[0].lower()
        assert brand not in words and brand not in " ".join(attributes).split()


def fits(product, chosen, goal, wanted, limit) -> bool:
    """By the catalogue itself: the kind, the lists of attributes and options, the price."""
    return (
        product.kind == wanted.kind
        and set(goal.attributes) <= set(product.attributes)
        and all(chosen.get(name) == value for name, value in goal.options)
        and round(100 * product.price) <= round(100 * limit)
    )


def test_the_whole_catalogue_against_every_goal():
    """6 goals x 1,000 products, with the options that were asked for where the product has them, or any others."""
    env, rng, right = WebShop(), random.Random(0), 0
    for seed in range(6):
        env.reset(seed=seed)
        wanted = env.catalogue.products[env.goal.product]
        for n, product in enumerate(env.catalogue.products):
            asked = dict(env.goal.options)
            chosen = {k: asked.get(k) if asked.get(k) in v else rng.choice(v) for k, v in product.options.items()}
            if n != env.goal.product and rng.random() < 0.3:
                chosen = {k: rng.choice(v) for k, v in product.options.items() if rng.random() < 0.8}
            reward = score(product, chosen, wanted, env.goal, env.limit)
            assert (reward == 1.0) == fits(product, chosen, env.goal, wanted, env.limit)
            assert 0.0 <= reward <= 1.0 and (product.kind == wanted.kind or reward == 0.0)
            right += reward == 1.0
    assert right >= 6
