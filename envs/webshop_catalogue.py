"""The products of the web shop and what is asked for: generated from webshop_words.yaml, or read from WebShop's own files.

Words are chosen so that the reward rule (webshop.py) cannot be met by accident: no two kinds of product share a word of their
names, no attribute uses one, no brand sells two kinds, and no value of an option is part of another one.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from nanoragen.envs.data import bundled, stamp, usable
from nanoragen.envs.retrieval import Index

EVERY = 5  # one product in so many is asked for in evaluation alone
WORDS = bundled("webshop_words")
# department -> attributes, and kinds of product with their lowest and highest price and their options
DEPARTMENTS = {
    name: (d["attributes"], {kind: (low, high, WORDS["options"][sort]) for kind, (low, high, sort) in d["kinds"].items()})
    for name, d in WORDS["departments"].items()
}
BRANDS = 6  # of each kind


@dataclass(frozen=True)
class Product:
    """One product. price: in dollars, what the limit is held against; price_text: as the page shows it."""

    id: str
    name: str
    kind: str  # WebShop's "query": what one would type to find such things
    category: str  # path, "Clothing › Rain Jacket"
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    price: float
    price_text: str
    description: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class Goal:
    """What is asked for. options: (option, value) pairs, the option "" where any may have the value; None: drawn at reset."""

    product: int
    text: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...] | None = None


class Catalogue:
    """Products, their index, and the goals: `goals` for training, `held_out` for evaluation (no product is in both)."""

    def __init__(self, products: list[Product], goals: list[Goal]):
        self.products = products
        self.goals = [g for g in goals if g.product % EVERY] or goals
        self.held_out = [g for g in goals if g.product % EVERY == 0] or goals
        self.index = Index([_document(p) for p in products])


def _document(p: Product) -> str:
    options = (f"{name}: {', '.join(values)}" for name, values in p.options.items())
    return " ".join([p.name, p.description, *p.features, *options])


# -- generated ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def generated(count: int, seed: int) -> Catalogue:
    """A catalogue of `count` products. The same arguments give the same one, in every process."""
    rng = np.random.default_rng([seed, count])
    kinds = [(d, kind) for d, (_, kinds) in DEPARTMENTS.items() for kind in kinds]
    names = [a + b + c for a in WORDS["syllables"] for b in WORDS["syllables"] if a != b for c in WORDS["endings"]]
    brands = rng.permutation(names)[: BRANDS * len(kinds)].reshape(len(kinds), BRANDS)
    products, taken = [], set()
    while len(products) < count:
        n = len(products) % len(kinds)
        product = _product(rng, len(products), *kinds[n], str(rng.choice(brands[n])))
        if product.name not in taken:  # a name is a product: searching for it finds it
            taken.add(product.name)
            products.append(product)
    goals = [_goal(rng, n, p) for n, p in enumerate(products)]
    return Catalogue(products, goals)


def _product(rng, number, department, kind, brand) -> Product:
    attributes, kinds = DEPARTMENTS[department]
    low, high, options = kinds[kind]
    mine = tuple(rng.permutation(attributes)[: rng.integers(3, 6)].tolist())
    cents = int(rng.integers(100 * low, 100 * high))
    return Product(
        id=f"B{(number * 61_803 + 7_919) % 100_000:05d}",  # all different, and not in the order of the kinds
        name=f"{brand} {mine[0]} {mine[1]} {kind}".title(),  # the others stand on the pages of the product only
        kind=kind,
        category=f"{department} › {kind.title()}",
        attributes=mine,
        options={name: tuple(v for v in values if rng.random() < 0.6) or (values[0],) for name, values in options.items()},
        price=cents / 100,
        price_text=f"${cents / 100:.2f}",
        description=f"A {kind} by {brand.title()}: {', '.join(mine)}.",
        features=(*(a.capitalize() for a in mine), f"Sold by {brand.title()}"),
    )


def _goal(rng, number, product) -> Goal:
    wanted = tuple(rng.permutation(product.attributes)[: rng.integers(1, 4)].tolist())
    return Goal(number, f"Find me {', '.join(wanted)} {product.kind}", wanted)


# -- WebShop's files ---------------------------------------------------------------------------------------------------


def from_files(path: str) -> Catalogue:
    """WebShop's data: items_shuffle.json, beside it items_ins_v2.json, and items_human_ins.json where people's goals are wanted.

    path: the products' file, or its folder. The ending of its name, such as _1000, is looked for at items_ins_v2 too. A product
    with a range of prices counts with the highest. Read once, and again when a file has changed. A product that cannot be used is
    skipped (data.py). ValueError for a file that cannot be used, naming it.
    """
    file = Path(path)
    if file.is_dir():
        file = next((f for f in (file / "items_shuffle.json", file / "items_shuffle_1000.json") if f.exists()), file)
    ending = file.stem.removeprefix("items_shuffle")
    files = file, file.with_name(f"items_ins_v2{ending}.json"), file.with_name("items_human_ins.json")
    return _from_files(*files, *map(stamp, files))


@lru_cache(maxsize=4)
def _from_files(file: Path, attributes: Path, people: Path, *_stamps) -> Catalogue:
    rows, asked = _read(file, list), _read(attributes, dict)
    told = _read(people, dict) if people.exists() else {}
    products, goals, taken = [], [], set()

    def add(row):
        if row["asin"] == "nan" or len(row["asin"]) > 10 or row["asin"] in taken:  # as WebShop skips them
            return
        about = asked.get(row["asin"], {})
        product = _from_row(row, about)
        mine = _goals_of(len(products), about, told.get(row["asin"], []), people.exists())
        texts = [product.kind, product.category, *product.attributes, _document(product)]
        for goal in mine:
            texts += [goal.text, *goal.attributes, *(value for _, value in goal.options or ())]
        "".join(texts).encode()  # an exception for what is no text
        goals.extend(mine)
        products.append(product)
        taken.add(row["asin"])

    usable(file, rows, add)
    if not goals:
        raise ValueError(f"data: {file} and the files beside it ask for none of its products; valid: WebShop's files")
    return Catalogue(products, goals)


def _read(file: Path, kind: type):
    try:
        found = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise ValueError(f"data: {file} cannot be read ({e.strerror}); valid: WebShop's files") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"data: {file} is not JSON ({e}); valid: WebShop's files") from e
    if not isinstance(found, kind):
        raise ValueError(f"data: {file} holds no {kind.__name__}; valid: WebShop's files")
    return found


def _from_row(row: dict, about: dict) -> Product:
    prices = [float(re.sub(r"[^\d.]", "", p)) for p in (row.get("pricing") or "$100.0").split("$")[1:]][:2] or [100.0]
    features = row["small_description"]
    options = {}
    for name, contents in (row.get("customization_options") or {}).items():
        if contents:
            options[name.lower()] = tuple(c["value"].strip().replace("/", " | ").lower() for c in contents)
    return Product(
        id=row["asin"],
        name=row["name"],
        kind=row["query"].lower().strip(),
        category=row["product_category"],
        attributes=tuple(about.get("attributes", ())),
        options=options,
        price=max(prices),
        price_text=" to ".join(f"${p}" for p in prices),
        description=row["full_description"] or "",
        features=tuple(f for f in (features if isinstance(features, list) else [features]) if f),
    )


def _goals_of(number: int, about: dict, told: list, by_people: bool) -> list[Goal]:
    """The goals for a product: those that people wrote down, or the one made from its attributes."""
    if not by_people:
        told = [about] if about.get("instruction") else []
    goals = []
    for t in told:
        options = t.get("instruction_options") if by_people else None
        if isinstance(options, dict):
            options = tuple((name.lower(), value) for name, value in options.items())
        elif options is not None:
            options = tuple(("", value) for value in options)
        if t["instruction_attributes"]:
            goals.append(Goal(number, t["instruction"].strip("."), tuple(t["instruction_attributes"]), options))
    return goals
