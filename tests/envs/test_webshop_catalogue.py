"""The products of webshop: the generated ones, and WebShop's own files (I3), whole, odd and damaged."""

import itertools
import json
import re

import pytest

pytest.importorskip("bm25s")

from nanoragen.envs.base import TRAIN_SEEDS  # noqa: E402
from nanoragen.envs.webshop import WebShop  # noqa: E402
from nanoragen.envs.webshop_catalogue import DEPARTMENTS, generated  # noqa: E402


def test_the_catalogue():
    products = generated(1000, 0).products
    assert len(products) == 1000 == len({p.id for p in products}) == len({p.name for p in products})
    assert len({p.kind for p in products}) == 42
    for p in products:
        attributes, kinds = DEPARTMENTS[p.category.split(" › ")[0]]
        low, high, options = kinds[p.kind]
        assert low <= p.price < high and p.price_text == f"${p.price:.2f}"
        assert 3 <= len(p.attributes) == len(set(p.attributes)) and set(p.attributes) <= set(attributes)
        assert set(p.options) == set(options) and all(p.options[k] and set(p.options[k]) <= set(options[k]) for k in options)
    assert generated.__wrapped__(60, 3).products == generated(60, 3).products != generated(60, 4).products
    assert WebShop().catalogue is WebShop().catalogue  # built once


# -- WebShop's files ---------------------------------------------------------------------------------------------------


def item(asin, **changes):
    return {
        "asin": asin, "name": f"Acme {asin} Loose Fit Tuxedo Shirt", "category": "fashion", "query": "Tuxedo Shirts ",
        "product_category": "Clothing, Shoes & Jewelry › Men › Shirts", "pricing": "$19.99", "images": ["x.jpg"],
        "full_description": "A shirt.", "small_description": ["Cotton", "Machine wash"],
        "customization_options": {"Size": [{"value": "Small", "image": None}, {"value": "X-Large "}], "Color": None},
        **changes,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """WebShop's three files, small, with what is odd in the large ones."""
    items = [
        item("A000000001"),
        item("A000000002", pricing="$1,010.00 to $1,020.50", small_description="One feature", full_description=None),
        item("A000000003", pricing=None, customization_options={"Color": [{"value": "Red/Black"}, {"value": "navy blue"}]}),
        item("A000000003", name="the same again"),
        item("nan"),
        item("A00000000004"),
    ]
    about = {
        "attributes": ["loose fit", "machine wash"],
        "instruction": "Find me loose fit men's shirts",
        "instruction_attributes": ["loose fit"],
    }
    asked = {"A000000001": about, "A000000002": {**about, "instruction": None}, "A000000003": about}

    def goal(text, attributes, options):
        return {"instruction": text, "instruction_attributes": attributes, "instruction_options": options}

    told = {
        "A000000003": [goal("i want a loose fit shirt in blue.", ["loose fit"], ["blue"]), goal("nothing to check", [], [])],
        "A000000001": [goal("get me a small one", ["machine wash"], {"Size": "Small"})],
    }
    for name, content in (("items_shuffle_1000", items), ("items_ins_v2_1000", asked), ("items_human_ins", told)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return tmp_path


def test_goals_that_people_wrote(folder):
    env = WebShop(data=str(folder))
    assert [p.id for p in env.catalogue.products] == ["A000000001", "A000000002", "A000000003"]
    assert [p.price for p in env.catalogue.products] == [19.99, 1020.5, 100.0]
    assert env.catalogue.products[1].price_text == "$1010.0 to $1020.5"
    assert env.catalogue.products[2].options == {"color": ("red | black", "navy blue")}
    texts = set()
    for seed in [*range(20), *range(TRAIN_SEEDS.start, TRAIN_SEEDS.start + 20)]:
        texts.add(re.sub(r", and price lower than .*", "", env.reset(seed=seed)[0].split(" [SEP] ")[2]))
        for action in itertools.islice(env.demonstrate(), 8):
            result = env.step(action)
        assert result[4]["success"] or env.goal.options == (("", "blue"),)
    assert texts == {"i want a loose fit shirt in blue", "get me a small one"}


def test_goals_of_an_option_without_a_name(folder):
    env = WebShop(data=str(folder / "items_shuffle_1000.json"))
    env.reset(seed=TRAIN_SEEDS.start)
    assert env.goal.options == (("", "blue"),)
    env.step("search[shirt]")
    env.step("click[a000000003]")
    env.step("click[Navy Blue]")  # the nearest there is
    assert env.step("click[Buy Now]")[1] == 1.0


def test_goals_made_from_attributes_where_there_are_none_of_people(folder):
    (folder / "items_human_ins.json").unlink()
    env = WebShop(data=str(folder))
    assert {g.product for g in env.catalogue.goals + env.catalogue.held_out} == {0, 2}
    text, _ = env.reset(seed=0)
    assert re.search(r"Find me loose fit men's shirts with size: (small|x-large), and price lower than [345]0.00 dollars", text)
    for action in env.demonstrate():
        result = env.step(action)
    assert result[1] == 1.0


def test_pages_are_webshops(folder):
    """Its simple text mode: the visible texts of each page, joined by [SEP]."""
    env = WebShop(data=str(folder))
    text, _ = env.reset(seed=0)
    top = f"Instruction: [SEP] {env.text}"
    assert text == f"WebShop [SEP] {top} [SEP] Search"
    assert env.step("search[A000000001]")[0] == (
        f"{top} [SEP] Back to Search [SEP] Page 1 (Total results: 1) [SEP] "
        "A000000001 [SEP] Acme A000000001 Loose Fit Tuxedo Shirt [SEP] $19.99"
    )
    page = (
        f"{top} [SEP] Back to Search [SEP] < Prev [SEP] size [SEP] small [SEP] x-large [SEP] "
        "Acme A000000001 Loose Fit Tuxedo Shirt [SEP] Price: $19.99 [SEP] Rating: N.A. [SEP] "
        "Description [SEP] Features [SEP] Buy Now"
    )
    assert env.step("click[A000000001]")[0] == page
    assert env.step("click[Features]")[0] == f"{top} [SEP] Back to Search [SEP] < Prev [SEP] Cotton [SEP] Machine wash"
    assert env.step("click[< Prev]")[0] == page
    assert env.step("click[Description]")[0] == f"{top} [SEP] Back to Search [SEP] < Prev [SEP] A shirt."
    env.step("click[< Prev]"), env.step("click[small]")
    assert env.step("click[Buy Now]")[0] == "Thank you for shopping with us! [SEP] Your score (min 0.0, max 1.0) [SEP] 1.00"


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("items_shuffle_1000", "{", "is not JSON"),
        ("items_shuffle_1000", "{}", "holds no list"),
        ("items_shuffle_1000", "[3]", "row 1: is not in a form that is known "),
        ("items_shuffle_1000", '[{"asin": "B1"}]', "row 1: no 'small_description'"),
        ("items_shuffle_1000", "[" * 100_000, "is not JSON"),
        ("items_shuffle_1000", "[]", "ask for none of its products"),
        ("items_ins_v2_1000", "[]", "holds no dict"),
        ("items_ins_v2_1000", None, "cannot be read"),
        ("items_human_ins", "{}", "ask for none of its products"),
    ],
)
def test_files_that_cannot_be_used(folder, name, content, says):
    file = folder / f"{name}.json"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ValueError, match=f"^data: .*{says}.*valid: (WebShop's|rows as envs/README)") as error:
        WebShop(data=str(folder))
    assert "\n" not in str(error.value)


ODD = [{"name": None}, {"pricing": "$cheap"}, {"query": 3}, {"product_category": None}, {"small_description": [3]}, {"name": "\ud800"},
       {"customization_options": {"Size": [{"value": None}]}}, {"customization_options": [1]}]  # fmt: skip


def test_products_that_cannot_be_used_are_skipped(folder, capsys):
    file = folder / "items_shuffle_1000.json"
    rows = [item(f"B{n}", **changes) for n, changes in enumerate(ODD)] + json.loads(file.read_text())
    file.write_text(json.dumps(rows))
    env = WebShop(data=str(folder))
    assert [p.id for p in env.catalogue.products] == ["A000000001", "A000000002", "A000000003"]
    said = capsys.readouterr().err
    assert f"{len(ODD)} of {len(rows)} rows cannot be used and are skipped; row 1: is not in a form that is known" in said
    assert said.count("\n") == 1
    env.reset(seed=0)
    assert env.step("search[shirt]")[4]["action_is_valid"]


def test_goals_that_cannot_be_used_take_their_product_along(folder, capsys):
    file = folder / "items_human_ins.json"
    told = json.loads(file.read_text())
    bad = {"instruction": 3, "instruction_attributes": [None], "instruction_options": []}
    file.write_text(json.dumps({**told, "A000000001": [bad]}))
    assert [p.id for p in WebShop(data=str(folder)).catalogue.products] == ["A000000002", "A000000003"]
    assert "1 of 6 rows" in capsys.readouterr().err


def test_files_that_changed_are_read_again(folder):
    for name, count in (("items_human_ins", 1), ("items_shuffle_1000", 1)):
        before = WebShop(data=str(folder)).catalogue
        assert WebShop(data=str(folder)).catalogue is before
        file = folder / f"{name}.json"
        file.write_text(file.read_text() + " " * count)
        assert WebShop(data=str(folder)).catalogue is not before
