"""What search_qa searches and asks: an invented world of people, towns, provinces and works, or files.

Every fact is said in the passage of the thing that it is about, so a question over three facts takes three passages.
"""

import re
import string
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nanoragen.envs.data import bundled, read_both, read_rows, stamp
from nanoragen.envs.retrieval import Index

EVERY = 5  # questions that start from one thing in so many are asked in evaluation alone


@dataclass(frozen=True)
class Question:
    """answers: spellings any of which is right. chain: numbers of the passages that lead to it, in their order."""

    text: str
    answers: tuple[str, ...]
    chain: tuple[int, ...]


class Library:
    """Passages, (title, text) each, with their index; questions to train on, and those to evaluate on."""

    def __init__(self, passages: list[tuple[str, str]], questions: list[Question], held_out: list[Question]):
        self.titles = [title for title, _ in passages]
        self.texts = [f"{title}: {text}" for title, text in passages]
        self.index = Index(self.texts)
        self.questions, self.held_out = questions, held_out


# -- an invented world -------------------------------------------------------------------------------------------------

WORDS = bundled("search_words")
PROVINCES, CRAFTS, RELATIONS = WORDS["provinces"], WORDS["crafts"], WORDS["relations"]


@lru_cache(maxsize=4)
def generated(people: int, seed: int) -> Library:
    """An invented world: its passages, and all questions of two and three hops. The same arguments give the same one."""
    rng = np.random.default_rng([seed, people])

    def some(values):
        return values[rng.integers(len(values))]

    towns = [a + b for a, b in _pairs(rng, WORDS["town"], WORDS["town_ends"], people // 2)]
    persons = [f"{some(WORDS['first'])} {a}{b}" for a, b in _pairs(rng, WORDS["last"], WORDS["last_ends"], people)]
    works = [f"The {a} {b}" for a, b in _pairs(rng, WORDS["work"], WORDS["work_ends"], people)]
    goods = rng.permutation(WORDS["goods"]).tolist()
    births = sorted(rng.integers(1700, 1900, size=people).tolist())  # of the persons in order: teachers are older
    facts, texts, crafts = {}, {}, {}
    for n, x in enumerate(PROVINCES):
        facts[x] = f = {"capital": towns[n], "goods": goods[n]}
        texts[x] = f"{x} is a province known for its {f['goods']}. The capital of {x} is {f['capital']}."
    for n, x in enumerate(towns):
        province = PROVINCES[n] if n < len(PROVINCES) else some(PROVINCES)  # a capital lies in its own province
        facts[x] = f = {"province": province, "river": some(WORDS["rivers"]), "founded": str(rng.integers(900, 1500))}
        texts[x] = f"{x} is a town in {province}, on the river {f['river']}. {x} was founded in {f['founded']}."
    for n, x in enumerate(persons):
        crafts[x] = some(list(CRAFTS))
        facts[x] = f = {"birthplace": some(towns), "born": str(births[n])}
        texts[x] = f"{x} was a {crafts[x]}, born in {f['birthplace']} in {f['born']}."
        if n:
            f["teacher"] = some(persons[:n])
            texts[x] += f" The teacher of {x} was {f['teacher']}."
    for x in works:
        maker = persons[n := rng.integers(people)]
        facts[x] = {"maker": maker}
        work, crafts[x] = CRAFTS[crafts[maker]]
        texts[x] = f"{x} is {work} by {maker}, finished in {births[n] + rng.integers(20, 60)}."
    titles = rng.permutation(list(facts)).tolist()
    number = {x: n for n, x in enumerate(titles)}
    asked = [(number[x] % EVERY == 0, q) for x in titles for q in _questions(x, facts, crafts, number)]
    return Library([(x, texts[x]) for x in titles], [q for out, q in asked if not out], [q for out, q in asked if out])


def _pairs(rng, starts, ends, count) -> list[tuple[str, str]]:
    """`count` different pairs."""
    return [(starts[i // len(ends)], ends[i % len(ends)]) for i in rng.permutation(len(starts) * len(ends))[:count]]


def _questions(start, facts, crafts, number) -> Iterator[Question]:
    """All questions about a thing that go over two or three facts, none of which leads back to where it was."""
    paths = [([start], "", start)]  # the things passed, the question that ends here, and how the last is called in a longer one
    for hops in (1, 2, 3):
        longer = []
        for things, _, called in paths:
            for relation, value in facts.get(things[-1], {}).items():
                question, phrase = (form.format(x=called, craft=crafts.get(things[-1])) for form in RELATIONS[relation])
                if value not in things:
                    longer.append(([*things, value], question, phrase))
        paths = longer
        if hops > 1:
            yield from (Question(q, (t[-1],), tuple(number[x] for x in t[:-1])) for t, q, _ in paths)


# -- files -------------------------------------------------------------------------------------------------------------


def from_files(data: str, eval_data: str, corpus: str) -> Library:
    """Questions and passages from files; the arguments are those of SearchQA. Made once, and again when a file has changed."""
    return _from_files(data, eval_data, corpus, stamp(data), stamp(eval_data), stamp(corpus))


@lru_cache(maxsize=4)
def _from_files(data: str, eval_data: str, corpus: str, *_stamps) -> Library:
    rows, eval_rows = read_both(data, eval_data, lambda path: read_rows(path, _read_question))
    contexts = [p for row in [*rows, *eval_rows] for p in row[3]]
    passages = read_rows(corpus, _read_passage) if corpus else list(dict.fromkeys(contexts))
    if not passages:
        raise ValueError(f"corpus: none, and the rows of {data} have no context; valid: corpus=FILE, or HotpotQA's rows")
    number = {title: n for n, (title, _) in reversed(list(enumerate(passages)))}

    def questions(rows):
        return [Question(text, answers, tuple(number[t] for t in titles if t in number)) for text, answers, titles, _ in rows]

    return Library(passages, questions(rows), questions(eval_rows))


def _read_question(row: dict) -> tuple[str, tuple[str, ...], list[str], list[tuple[str, str]]]:
    """(question, answers, titles of the passages that support it, its own passages) of a row: HotpotQA's own JSON, the form it
    has on the Hugging Face hub, or any row with `question` and `answer` (or a list, `golden_answers`)."""
    answers = row.get("golden_answers") or row.get("answer")
    answers = tuple(answers) if isinstance(answers, list) else (answers,)
    if not (isinstance(row.get("question"), str) and answers and all(isinstance(a, str) and a.strip() for a in answers)):
        raise ValueError('valid: {"question": "text", "answer": "text"}')
    if not any(map(normal, answers)):
        raise ValueError(f"no word is left of the answer {answers[0]!r:.80} when it is compared; valid: one with words")
    facts, context = row.get("supporting_facts") or [], row.get("context") or []
    try:
        titles = facts["title"] if isinstance(facts, dict) else [title for title, _ in facts]
        pairs = zip(context["title"], context["sentences"]) if isinstance(context, dict) else context
        passages = [(title, "".join(sentences).strip()) for title, sentences in pairs]
        if not all(isinstance(title, str) for title in [*titles, *(title for title, _ in passages)]):
            raise TypeError("a title is no text")
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError("its supporting_facts or context is unlike HotpotQA's; valid: as there, or none") from e
    return row["question"], answers, list(dict.fromkeys(titles)), passages


def normal(text: str) -> str:
    """SQuAD's normalisation: "The  Vel!" -> "vel"."""
    text = "".join(c for c in unicodedata.normalize("NFC", text).lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _read_passage(row: dict) -> tuple[str, str]:
    """(title, text) of a row of a corpus."""
    if isinstance(row.get("contents"), str):
        title, _, text = row["contents"].partition("\n")
        return title.strip('"'), text
    if not (isinstance(row.get("title"), str) and isinstance(row.get("text"), str)):
        raise ValueError('valid: {"title": "text", "text": "text"}, or {"contents": "title\\ntext"}')
    return row["title"], row["text"]
