"""WebShop (Yao et al. 2022): search a shop, read its pages, choose options, buy what the instruction describes.

Pages are text as in WebShop's simple mode: the visible texts joined by [SEP]; whatever can be clicked is among them. Buying
ends the episode and pays the paper's reward, in [0, 1]:

    r = r_type * (attributes met + options met + [price <= limit]) / (attributes + options + 1)

Success is r = 1. The product that the goal was made from always earns it; another one may, if it meets everything.

Left out: pictures, reviews, the page of attributes, and spaCy (envs/README.md says what is judged differently from WebShop's code).
"""

import math
import re

from nanoragen.envs.base import Game, check_whole, held_out
from nanoragen.envs.retrieval import parse_action
from nanoragen.envs.webshop_catalogue import Goal, Product, from_files, generated

FOUND = 50  # products of a search at most
MAX_TEXT = 1_000  # characters of a description or a feature that are shown
STOP = {"a", "an", "and", "by", "for", "from", "in", "of", "on", "or", "the", "to", "with"}  # as `_words` gives them


class WebShop(Game):
    """
    products        of the generated catalogue, 10 to 10,000
    per_page        products of a page of results, 1 to 10 (WebShop: 10)
    catalogue_seed  another number, another catalogue
    data            WebShop's own data instead: its items_shuffle.json, or the folder it lies in (webshop_catalogue.py)

    Every fifth product is asked for in evaluation only (base.held_out), so no goal of an evaluation was trained on.
    """

    max_turns = 8
    max_actions_per_turn = 1
    instruction = (
        "You shop online: find a product that fits the instruction, choose its options, and buy it. Actions: search[words] on the "
        "search page; elsewhere click[text] with a button, product id or option that the page shows. "
        "Reply <think>your reasoning</think><answer>search[red wool socks]</answer>"
    )

    def __init__(self, products=1000, per_page=10, catalogue_seed=0, data=""):
        super().__init__()
        check_whole("webshop", 10, 10_000, products=products)
        check_whole("webshop", 1, 10, per_page=per_page)
        check_whole("webshop", 0, catalogue_seed=catalogue_seed)
        self.per_page = per_page
        self.catalogue = from_files(str(data)) if data else generated(products, catalogue_seed)

    def _start(self, seed):
        goals = self.catalogue.held_out if held_out(seed) else self.catalogue.goals
        self.goal, self.limit, self.text = _ask(self.np_random, goals, self.catalogue.products)
        self.page, self.results, self.number, self.item, self.chosen = "search", [], 1, -1, {}
        self.earned = 0.0

    def step(self, action):
        verb, argument = parse_action(action)
        target = _plain(argument)
        before, reward = self._state(), 0.0
        valid = self.page == "search" if verb == "search" else verb == "click" and target in self.buttons()
        if valid and verb == "search":
            self.page, self.number, self.results = "results", 1, self.catalogue.index.search(argument, FOUND)
        elif valid:
            reward = self._click(target)
        return self._result(reward, self.page == "done", self.page == "done" and self.earned == 1.0, valid, self._state() != before)

    def render(self):
        return " [SEP] ".join(text for text, _ in self._parts())

    # -- pages ---------------------------------------------------------------------------------------------------------

    def buttons(self) -> list[str]:
        """What can be clicked on this page, in small letters, in its order."""
        return [_plain(text) for text, clickable in self._parts() if clickable]

    def _parts(self) -> list[tuple[str, bool]]:
        """The page: its visible texts, and whether they can be clicked."""
        if self.page == "done":
            texts = "Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", f"{self.earned:.2f}"
            return [(t, False) for t in texts]
        top = [("Instruction:", False), (self.text, False)]
        if self.page == "search":
            return [("WebShop", False), *top, ("Search", False)]
        top.append(("Back to Search", True))
        if self.page == "results":
            first, last = (self.number - 1) * self.per_page, self.number * self.per_page
            top += [(f"Page {self.number} (Total results: {len(self.results)})", False)]
            top += [("< Prev", True)] if self.number > 1 else []
            top += [("Next >", True)] if last < len(self.results) else []
            for product in (self.catalogue.products[n] for n in self.results[first:last]):
                top += [(product.id, True), (product.name, False), (product.price_text, False)]
            return top
        top.append(("< Prev", True))
        product = self.catalogue.products[self.item]
        if self.page == "description":
            return [*top, (product.description[:MAX_TEXT] or "No Description", False)]
        if self.page == "features":
            return top + [(f[:MAX_TEXT], False) for f in product.features or ("No Features",)]
        for name, values in product.options.items():
            top += [(name, False), *((v, True) for v in values)]
        top += [(product.name, False), (f"Price: {product.price_text}", False), ("Rating: N.A.", False)]
        return top + [(button, True) for button in ("Description", "Features", "Buy Now")]

    def _click(self, target: str) -> float:
        """Click one of `buttons()`. Returns the reward."""
        if target == "back to search":
            self.page, self.results, self.item, self.chosen = "search", [], -1, {}
        elif target == "next >":
            self.number += 1
        elif target == "< prev" and self.page == "results":
            self.number -= 1
        elif target == "< prev":
            self.page = "results" if self.page == "item" else "item"
        elif self.page == "results":
            self.page, self.chosen = "item", {}
            self.item = next(n for n in self.results if self.catalogue.products[n].id.lower() == target)
        elif target in ("description", "features"):
            self.page = target
        elif target == "buy now":
            bought = self.catalogue.products[self.item]
            self.page, self.earned = "done", score(bought, self.chosen, self._wanted(), self.goal, self.limit)
            return self.earned
        else:
            options = self.catalogue.products[self.item].options
            self.chosen = self.chosen | {name: v for name, values in options.items() for v in values if _plain(v) == target}
        return 0.0

    def _wanted(self) -> Product:
        return self.catalogue.products[self.goal.product]

    def _state(self):
        return self.page, self.number, self.item, tuple(self.results), tuple(self.chosen.items())

    # -- solver --------------------------------------------------------------------------------------------------------

    def random_action(self, rng) -> str:
        """Two words of the instruction to search for, or something to click."""
        if self.page == "search":
            return f"search[{' '.join(rng.choice(re.findall(r'[A-Za-z]+', self.text), size=2))}]"
        return f"click[{rng.choice(self.buttons() or ['buy now'])}]"

    def best_actions(self) -> list[str]:
        """The next steps to the product that the goal was made from; in any order where options are left to choose."""
        at = self.goal.product
        if self.page == "done":
            return []
        if self.page == "search":
            return [f"search[{self._query()}]"]
        if self.page == "results":
            page = self.results.index(at) // self.per_page + 1 if at in self.results else 0
            if page == self.number:
                return [f"click[{self._wanted().id}]"]
            return ["click[Back to Search]" if not page else "click[Next >]" if page > self.number else "click[< Prev]"]
        if self.item != at or self.page != "item":
            return ["click[< Prev]"]
        chosen, buttons = [_plain(v) for v in self.chosen.values()], self.buttons()
        left = [v for _, v in self.goal.options if _plain(v) in buttons and _plain(v) not in chosen]
        return [f"click[{v}]" for v in left] or ["click[Buy Now]"]

    def _query(self) -> str:
        """The words of the goal, where they bring its product onto the first page; the name of the product where not."""
        words = " ".join([*self.goal.attributes, self._wanted().kind, *(value for _, value in self.goal.options)])
        found = self.catalogue.index.search(words, self.per_page)
        return words if self.goal.product in found else self._wanted().name


def _ask(rng, goals: list[Goal], products: list[Product]) -> tuple[Goal, float, str]:
    """One of the goals with its options settled, a limit of the price, and the instruction.

    The limit is drawn as in WebShop: the larger of two of the next four multiples of ten dollars, none close to 1,000.
    """
    goal = goals[rng.integers(len(goals))]
    product, text = products[goal.product], goal.text
    if goal.options is None:
        options = tuple((name, values[rng.integers(len(values))]) for name, values in sorted(product.options.items()))
        goal = Goal(goal.product, text, goal.attributes, options)
        text += " with " * bool(options) + ", and ".join(f"{name}: {value}" for name, value in options)
    tens = [10.0 * i for i in range(1, 100) if 10 * i > product.price][:4]
    if len(tens) < 2:
        return goal, math.inf, text
    limit = float(rng.permutation(tens)[:2].max())
    return goal, limit, f"{text}, and price lower than {limit:.2f} dollars"


# -- reward ------------------------------------------------------------------------------------------------------------


def score(bought: Product, chosen: dict[str, str], wanted: Product, goal: Goal, limit: float) -> float:
    """The reward of WebShop (Yao et al. 2022), in [0, 1], for a product with the options chosen."""
    attributes = sum(_has(bought, a) for a in goal.attributes)
    options = sum(_chose(bought, chosen, name, value) for name, value in goal.options)
    most = len(goal.attributes) + len(goal.options) + 1
    return _type(bought, wanted) * (attributes + options + (bought.price <= limit)) / most


def _type(bought: Product, wanted: Product) -> float:
    """r_type: 1 for the same sort of thing; 0.5, 0.1 and 0 the less the names have in common."""
    names = _name_words(wanted)
    same = len(names & _name_words(bought)) / len(names) if names else 0.2
    alike = bought.kind == wanted.kind or len(_path(bought) & _path(wanted)) >= 2
    if same == 0:
        return 0.0
    if same < 0.1:
        return 0.1
    return 1.0 if alike or same > 0.2 else 0.5


def _has(product: Product, attribute: str) -> bool:
    """Whether the product has the attribute: among its own with all its words, or said on its pages."""
    wanted, phrase = set(_words(attribute)), f" {' '.join(_words(attribute))} "
    if not wanted:
        return False
    if any(wanted <= set(_words(own)) for own in product.attributes):
        return True
    pages = (product.name, " ".join(product.features), product.description)
    return any(phrase in f" {' '.join(_words(text))} " for text in pages)


def _chose(product: Product, chosen: dict[str, str], name: str, value: str) -> bool:
    """Whether a value that was asked for is chosen. Where the product does not have it, "powder snow" will do for "cool powder
    snow" (WebShop's fuzzy match), but for sizes."""
    picked = {n: v for n, v in chosen.items() if name in ("", n)}
    if any(_words(v) == _words(value) for n, values in product.options.items() if name in ("", n) for v in values):
        return any(_words(v) == _words(value) for v in picked.values())
    return any(n != "size" and _near(v, value) for n, v in picked.items())


def _near(one: str, other: str) -> bool:
    """Whether one value has all words of the other, and the numbers are the same."""
    a, b = set(_words(one)), set(_words(other))
    numbers = [{w for w in s if any(c.isdigit() for c in w)} for s in (a, b)]
    return bool(a and b) and numbers[0] == numbers[1] and (a <= b or b <= a)


def _words(text: str) -> list[str]:
    """Small letters, no punctuation, no plural s: "Pack of 6.5 Socks" -> pack, of, 6.5, sock."""
    return [w[:-1] if len(w) > 3 and w.endswith("s") else w for w in re.findall(r"\d+\.\d+|\w+", text.lower())]


def _name_words(product: Product) -> set[str]:
    return set(_words(product.name)) - {w for a in product.attributes for w in _words(a)} - STOP


def _path(product: Product) -> set[str]:
    return {part.strip() for part in product.category.split("›")}


def _plain(text: str) -> str:
    """How a button is told from others: small letters, single blanks."""
    return " ".join(text.lower().split())
