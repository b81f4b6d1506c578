"""The products of the web shop and what is asked for: generated from the word lists below, or read from WebShop's own files.

Words are chosen so that the reward rule (webshop.py) cannot be met by accident: no two kinds of product share a word of their
names, no attribute uses one, no brand sells two kinds, and no value of an option is part of another one.
"""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from nanoragen.envs.data import stamp, usable
from nanoragen.envs.retrieval import Index

EVERY = 5  # one product in so many is asked for in evaluation alone

COLORS = ("red", "navy", "black", "white", "teal", "beige", "purple", "orange", "pink", "brown", "silver", "yellow")
CLOTHES = {"color": COLORS, "size": ("small", "medium", "large", "x-large", "xx-large")}
SHOES = {"color": COLORS, "size": ("6", "7", "8", "9", "10", "11")}
COOKING = {"color": COLORS, "capacity": ("1 quart", "2 quart", "3 quart", "5 quart")}
PLAIN = {"color": COLORS}
DEVICE = {"color": COLORS, "cable": ("3 ft", "6 ft", "10 ft")}
FOOD = {"flavor": ("original", "lemon", "vanilla", "cinnamon", "ginger", "mint"), "pack": ("pack of 1", "pack of 3", "pack of 6")}
BEAUTY = {"scent": ("lavender", "citrus", "rose", "unscented", "coconut"), "volume": ("2 ounce", "4 ounce", "8 ounce")}
HOME = {"color": COLORS, "size": ("12 x 18 inch", "16 x 24 inch", "24 x 36 inch", "48 x 72 inch")}

# department -> attributes, and kinds of product with their lowest and highest price and their options
DEPARTMENTS = {
    "Clothing": (
        ("waterproof", "machine washable", "quick drying", "breathable", "slim fit", "fleece lined", "hand stitched", "stretchy"),
        {
            "rain jacket": (25, 120, CLOTHES), "denim shirt": (15, 60, CLOTHES), "wool socks": (6, 25, CLOTHES),
            "swim trunks": (12, 45, CLOTHES), "hiking boots": (40, 160, SHOES), "running sneakers": (35, 140, SHOES),
            "straw hat": (10, 40, PLAIN),
        },
    ),
    "Kitchen": (
        ("dishwasher safe", "non stick", "stainless steel", "heat resistant", "bpa free", "easy grip", "stackable", "rust proof"),
        {
            "frying pan": (15, 80, COOKING), "stock pot": (25, 120, COOKING), "water bottle": (8, 35, COOKING),
            "chef knife": (12, 110, PLAIN), "cutting board": (9, 50, PLAIN), "coffee grinder": (18, 95, PLAIN),
            "baking tray": (8, 40, PLAIN),
        },
    ),
    "Electronics": (
        ("fast charging", "noise cancelling", "wireless", "high resolution", "energy saving", "shock proof", "dimmable", "compact"),
        {
            "phone charger": (8, 45, DEVICE), "bluetooth speaker": (15, 150, DEVICE), "gaming mouse": (12, 90, DEVICE),
            "alarm clock": (10, 55, DEVICE), "desk lamp": (14, 85, DEVICE), "laptop sleeve": (9, 40, PLAIN),
            "webcam stand": (11, 60, PLAIN),
        },
    ),
    "Beauty": (
        ("cruelty free", "long lasting", "alcohol free", "doctor tested", "vegan", "oil free", "travel size", "hypoallergenic"),
        {
            "face moisturizer": (7, 60, BEAUTY), "lip balm": (3, 18, BEAUTY), "bath soap": (4, 25, BEAUTY),
            "hair conditioner": (6, 40, BEAUTY), "nail polish": (4, 20, PLAIN), "eye shadow": (6, 45, PLAIN),
            "makeup brush": (5, 35, PLAIN),
        },
    ),
    "Grocery": (
        ("gluten free", "low sodium", "sugar free", "usda organic", "non gmo", "dairy free", "individually wrapped", "kosher"),
        {
            "potato chips": (3, 20, FOOD), "peanut butter": (4, 25, FOOD), "trail mix": (5, 30, FOOD), "green tea": (4, 28, FOOD),
            "maple syrup": (7, 40, FOOD), "rice crackers": (3, 18, FOOD), "dark chocolate": (4, 32, FOOD),
        },
    ),
    "Home": (
        ("easy clean", "stain resistant", "solid wood", "eco friendly", "handmade", "foldable", "wall mounted", "double sided"),
        {
            "throw pillow": (10, 55, HOME), "shower curtain": (12, 60, HOME), "area rug": (30, 220, HOME),
            "picture frame": (8, 70, HOME), "round mirror": (25, 180, PLAIN), "storage basket": (10, 50, PLAIN),
            "window blinds": (18, 130, HOME),
        },
    ),
}  # fmt: skip
SYLLABLES = ("bra", "cor", "dal", "fen", "gor", "hul", "jor", "kel", "lun", "mar", "nor", "pel", "rho", "sil", "tor", "vex", "wim")
ENDINGS = ("a", "ex", "ia", "is", "o", "um", "ys")
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
    names = [a + b + c for a in SYLLABLES for b in SYLLABLES if a != b for c in ENDINGS]
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
        options={name: tuple(v for v in values if rng.random() < 0.6) or values[:1] for name, values in options.items()},
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
