"""What the environments with a search box share: ranking by BM25, and actions of the form verb[argument].

Ranking is bm25s (Lù 2024) with Lucene's formula, as in WebShop's own engine; ties go to the text that comes first, so a search
gives the same list on every machine. Left out: stemming (Lucene's analyser has it), so "shoe" does not find "shoes".
"""

import re

import numpy as np

MAX_QUERY = 300  # characters of a query that are looked at
WORD = r"(?u)\w+"  # one-letter words count too: sizes are such words
ACTION = re.compile(r"\s*(\w+)\s*\[(.*)\]\s*", re.DOTALL)


class Index:
    """An inverted index over `texts`. ValueError where bm25s is not installed."""

    def __init__(self, texts: list[str]):
        try:
            import bm25s
        except ImportError as e:
            raise ValueError("env: this one searches with bm25s, which is not here; valid: pip install 'nanoragen[envs]'") from e
        self._split = lambda texts: bm25s.tokenize(texts, token_pattern=WORD, stopwords="en", return_ids=False, show_progress=False)
        self._bm25 = bm25s.BM25(method="lucene", backend="numpy")
        words = self._split(texts)
        if not any(words):
            raise ValueError("env: there are no words in the texts to search in; valid: at least one that is no stop word")
        self._bm25.index(words, show_progress=False)

    def search(self, query: str, k: int) -> list[int]:
        """Numbers of at most k texts that share a word with the query, best first."""
        (words,) = self._split([query[:MAX_QUERY]])
        if not words:
            return []
        scores = self._bm25.get_scores(words)
        return [int(i) for i in np.argsort(-scores, kind="stable")[:k] if scores[i] > 0]


def parse_action(text) -> tuple[str, str]:
    """("search", "red shoes") of "Search[ red  shoes ]"; ("", "") for whatever is not verb[argument]."""
    match = ACTION.fullmatch(str(text))
    argument = " ".join(match[2].split()) if match else ""
    return (match[1].lower(), argument) if argument else ("", "")
